"""Sequence parallelism: token counts that do not divide, and weights whose ranks see other tokens.

SGD, because Adam blows up FP32 rounding beyond the tolerance where few targets are left, also in one process
against FP64.
"""

from collections.abc import Callable

import pytest
import torch

from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    Outcome,
    assert_parity,
    het3,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
    without_step,
)

D0 = sequences(24)
SGD = OptimizerSettings(name="sgd", lr=0.1)


def tp2(micro_batches: int, size: int) -> Strategy:
    return strategy((micro_batches, size, [stage("0-1", "0-3")]))


# Lengths not divisible by TP are cut wrongly around embedding and norms (O-13): the library pads inside.

ODD = (D0[0][:15], D0[1][:1], D0[2])


@pytest.mark.parametrize("layout", [tp2, het3])
def test_odd_lengths_and_a_single_token_train_like_one_device(layout: Callable[[int, int], Strategy]) -> None:
    steps = [ODD, (D0[3][:1], D0[4], D0[5][:15]), (D0[6][:15], D0[7][:15], D0[8][:1])]
    found = train(layout(3, 1), steps, settings=SGD)
    assert [result.valid_tokens for result in found.results] == [14 + 0 + 15, 0 + 15 + 14, 14 + 14 + 0]
    assert_parity(found, reference(steps, settings=SGD))


@pytest.mark.parametrize("layout", [tp2, het3])
def test_a_step_of_one_token_has_no_target_and_no_nan(layout: Callable[[int, int], Strategy]) -> None:
    steps = [(document,) for document in ODD]
    found = train(layout(1, 1), steps, settings=SGD)
    assert [result.valid_tokens for result in found.results] == [14, 0, 15]
    assert [result.skipped for result in found.results] == [
        "",
        "0 tokens: nothing to predict in this step",
        "",
    ]
    assert (found.losses[1], found.norms[1]) == (0.0, 0.0)
    assert_parity(without_step(found, 1), reference([steps[0], steps[2]], settings=SGD))


def test_packed_documents_of_odd_total_length_train_like_one_device() -> None:
    # 15 + 1 + 16 + 5 tokens in one micro-batch: 37, padded to 38.
    steps = [(*ODD, D0[3][:5]), (*ODD[1:], D0[4][:5], D0[5][:1])]
    assert_parity(train(tp2(1, 4), steps, settings=SGD), reference(steps, settings=SGD))


# Each rank sees a part of the tokens: norm weights drift apart without a sum over the group (O-27).

STEPS = [D0[at : at + 4] for at in range(0, 20, 4)]
# Two documents per micro-batch, one for each of the two ranks; few targets in the first, most in the second.
UNEVEN = {
    document: range(3 + at % 4, 16) if at % 2 == 0 else range(0, at % 5)
    for at, document in enumerate(document for step in STEPS for document in step)
}
NORMS = [
    *(f"layers.{layer}.{norm}.weight" for layer in range(4) for norm in ("attention_norm", "mlp_norm")),
    "final_norm.weight",
]


@pytest.mark.parametrize("plan", [tp2(2, 2), het4((1, 2), (1, 2))], ids=["TP2", "HET4"])
def test_norm_weights_of_ranks_with_different_tokens_stay_equal(plan: Strategy, zero_stage: int) -> None:
    found = train(plan, STEPS, masks=UNEVEN, settings=SGD)
    assert_parity(found, reference(STEPS, masks=UNEVEN, settings=SGD))
    for name in NORMS:
        first, *others = [shards[name] for shards in found.shards.values() if name in shards]
        assert others, f"{name} has copies"
        for kind in ("parameter",) if zero_stage else first:  # under ZeRO-1 the rest is cut
            assert all(torch.equal(first[kind], other[kind]) for other in others), f"{kind} of {name} drifted"


def test_gathered_weights_taken_up_again_give_the_same_loss() -> None:
    """One copy of each shard says what all ranks have, so gathering and cutting changes nothing."""
    plan = tp2(2, 2)
    going_on = train(plan, [*STEPS, D0[20:24]], masks=UNEVEN, settings=SGD)
    saved = train(plan, STEPS, masks=UNEVEN, settings=SGD)
    again = train(plan, [D0[20:24]], masks=UNEVEN, settings=SGD, prepare=start_from(saved))
    assert again.losses[0] == going_on.losses[5]


def start_from(saved: Outcome) -> Callable[[Session], None]:
    """A `prepare` that takes the weights of `saved`."""

    def value(slot: ParameterSlot) -> torch.Tensor:
        return saved.tensors[slot.name]["master"][tuple(slice(lo, hi) for lo, hi in slot.bounds)]

    def prepare(session: Session) -> None:
        session.state.initialise(value)

    return prepare
