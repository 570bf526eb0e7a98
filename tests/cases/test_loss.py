"""Scale of loss and gradient: every valid target of a step weighs the same, wherever and with whom it runs.

SGD, because Adam divides a wrong scale out of the update again,
and blows up rounding where few targets are left.
"""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    LOSS_RTOL,
    T0,
    Document,
    StepData,
    assert_parity,
    het4,
    reference,
    sequences,
    snapshot,
    stage,
    strategy,
    train,
    without_step,
    zero_head,
)

D0 = sequences(24)
SGD = OptimizerSettings(name="sgd", lr=0.02)


def one_rank(micro_batches: int, size: int) -> Strategy:
    return strategy((micro_batches, size, [stage("0", "0-3")]))


def leaving(valid: Mapping[Document, int]) -> dict[Document, Sequence[int]]:
    """Masks after which only the first `valid` targets of each document count."""
    return {document: range(count, len(document)) for document, count in valid.items()}


def mean_of_means(*parts: tuple[StepData, Mapping[Document, Sequence[int]]]) -> float:
    """The wrong loss: every part averaged by itself, then the averages averaged."""
    return sum(
        reference([documents], masks=masks, settings=SGD).losses[0] for documents, masks in parts
    ) / len(parts)


# Mean of micro-batch means: short micro-batches weigh too much (O-16).


@pytest.mark.parametrize(
    ("order", "grouping"),
    [((1, 2, 0), (2, 2)), ((0, 1, 2), (1, 3)), ((0, 1, 2), (2, 2))],
    ids=["3+1 targets", "4 targets at once", "2+2 targets"],
)
def test_four_targets_give_one_gradient_however_they_are_grouped(
    order: tuple[int, ...], grouping: tuple[int, int]
) -> None:
    # Documents of 1, 1 and 2 targets; a micro-batch takes the first two rows and the next one the third.
    masks = leaving({D0[0]: 1, D0[1]: 1, D0[2]: 2})
    found = train(one_rank(*grouping), [tuple(D0[i] for i in order)], masks=masks, settings=SGD)
    wanted = reference([D0[:3]], masks=masks, settings=SGD)
    assert found.results[0].valid_tokens == 4
    assert_parity(found, wanted)
    for name, tensors in wanted.tensors.items():
        assert (found.tensors[name]["gradient"] - tensors["gradient"]).abs().max() <= 1e-6, name
    wrong = mean_of_means(((D0[0],), masks), (D0[1:3], masks))
    assert abs(wrong - wanted.losses[0]) > 100 * LOSS_RTOL * wanted.losses[0], "the fault would show"


# Replicas with different token counts, each divided by its own count (O-17).


@pytest.mark.parametrize("swapped", [False, True])
def test_every_target_weighs_a_sixth_when_pipelines_have_five_and_one(swapped: bool) -> None:
    masks = leaving({D0[0]: 3, D0[1]: 2, D0[2]: 1, D0[3]: 0})
    rows = (*D0[2:4], *D0[0:2]) if swapped else D0[:4]
    # Two rows for each pipeline: 5 targets on one, 1 on the other.
    found = train(het4((1, 2), (1, 2)), [rows] * 3, masks=masks, settings=SGD)
    wanted = reference([D0[:4]] * 3, masks=masks, settings=SGD)
    assert [result.valid_tokens for result in found.results] == [6, 6, 6]
    assert_parity(found, wanted)
    wrong = mean_of_means((D0[0:2], masks), (D0[2:4], masks))
    assert abs(wrong - wanted.losses[0]) > 100 * LOSS_RTOL * wanted.losses[0], "the fault would show"


# Pipelines with different micro-batch counts, a fixed divisor or a missing reduction (O-18).


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3), (4, 0), (0, 4), (2, 2)])
def test_micro_batch_counts_of_the_pipelines_do_not_change_the_update(first: int, second: int) -> None:
    lengths = (16, 9, 16, 4)
    steps = [tuple(d[:n] for d, n in zip(D0[at : at + 4], lengths, strict=True)) for at in (0, 4, 8)]
    found = train(het4((first, 1), (second, 1)), steps, settings=SGD)
    assert [result.valid_tokens for result in found.results] == [41, 41, 41]
    assert_parity(found, reference(steps, settings=SGD))


# Gradient summed over stages, or divided again at every accumulation round; only the norm tells (O-19).


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_gradient_norm_depends_neither_on_stages_nor_on_accumulation(stages: int, micro_batches: int) -> None:
    layers = {1: ["0-3"], 2: ["0-1", "2-3"], 3: ["0-1", "2", "3"]}[stages]
    pipeline = [stage(str(rank), numbers) for rank, numbers in enumerate(layers)]
    steps = [D0[:8], D0[8:16]]
    found = train(strategy((micro_batches, 8 // micro_batches, pipeline)), steps, settings=SGD)
    assert found.norms == pytest.approx(reference(steps, settings=SGD).norms, rel=1e-5, abs=0)


# Nothing to predict in a micro-batch, a pipeline or a whole step: 0/0 (O-21).


@pytest.mark.parametrize("masked", [(0,), (1,), (2,), (3,), (0, 1, 2)], ids=str)
def test_fully_masked_micro_batches_and_pipelines_count_for_nothing(masked: tuple[int, ...]) -> None:
    # Rows 0 to 2 are the micro-batches of P0, row 3 is all of P1.
    steps = [D0[:4]] * 3
    masks = leaving({D0[row]: 0 for row in masked})
    found = train(het4(), steps, masks=masks, settings=SGD)
    assert found.results[0].valid_tokens == 15 * (4 - len(masked))
    assert_parity(found, reference(steps, masks=masks, settings=SGD))


def test_a_fully_masked_step_changes_nothing_and_the_next_one_trains() -> None:
    steps = [D0[0:4], D0[4:8], D0[8:12]]
    masks = leaving(dict.fromkeys(D0[4:8], 0))
    kept: list[list[Tensor]] = []
    found = train(
        het4(),
        steps,
        masks=masks,
        settings=SGD,
        before_step=lambda session, step: kept.append(snapshot(session)),
        collect=lambda session: kept,
    )
    nothing = found.results[1]
    assert (nothing.loss, nothing.grad_norm, nothing.valid_tokens) == (0.0, 0.0, 0)
    assert nothing.skipped == "0 tokens: nothing to predict in this step"
    for rank, (_, before, after) in found.extra.items():
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            f"rank {rank}: the step left traces"
        )
    assert_parity(without_step(found, 1), reference([steps[0], steps[2]], settings=SGD))


# An average that adds on gloo: gradients grow with the number of replicas (O-22).


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_identical_replicas_give_the_gradient_of_one(replicas: int, dtype: torch.dtype) -> None:
    one = train(one_rank(1, 1), [D0[:1]], dtype=dtype)
    several = strategy(*((1, 1, [stage(str(rank), "0-3")]) for rank in range(replicas)))
    found = train(several, [D0[:1] * replicas], dtype=dtype)
    assert found.losses == pytest.approx(one.losses, rel=1e-6, abs=0)
    assert found.norms == pytest.approx(one.norms, rel=1e-6, abs=0)
    # BF16 too: gradients are summed in FP32, so the copies add no rounding of their own.
    for name, tensors in one.tensors.items():
        torch.testing.assert_close(found.tensors[name]["gradient"], tensors["gradient"], rtol=1e-6, atol=0)


# The reference itself: what a loss must be when every token is equally likely.


@pytest.mark.parametrize("plan", [one_rank(2, 2), het4()], ids=["one rank", "HET4"])
def test_a_zero_head_gives_the_logarithm_of_the_vocabulary(plan: Strategy) -> None:
    found = train(plan, [D0[:4]], prepare=zero_head)
    assert found.losses[0] == pytest.approx(4.564348, abs=1e-6)
    assert found.losses[0] == pytest.approx(math.log(T0.vocab_size), abs=1e-6)
