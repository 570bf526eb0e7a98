"""The random start depends on no layout; all ranks decide together about gradients that are not finite."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.distributed.training import (
    ADAM,
    T0,
    alter_gradients,
    assert_parity,
    build,
    het4,
    micro_batch,
    reference,
    sequences,
    snapshot,
    stage,
    start,
    strategy,
    train,
    without_step,
)

D0 = sequences(24)
STEPS = [D0[0:4], D0[4:8], D0[8:12]]

# Shards of a matrix alike, stages alike, or replicas different, by one seed or one per rank (O-61).

FRESH = {
    "one rank": strategy((1, 4, [stage("0", "0-3")])),
    "TP2": strategy((1, 4, [stage("0-1", "0-3")])),
    "2 stages": strategy((4, 1, [stage("0", "0-1"), stage("1", "2-3")])),
    "4 stages": strategy((4, 1, [stage(str(rank), str(rank)) for rank in range(4)])),
    "HET4": het4(),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights_are_the_same_in_every_layout(name: str) -> None:
    # `train` finds all copies bit-equal: those of the two pipelines of HET4 too.
    found = train(FRESH[name], [])
    wanted = dict(build_single_device(T0, seed=7).named_parameters())
    assert found.tensors.keys() == wanted.keys()
    for parameter, value in wanted.items():
        assert torch.equal(found.tensors[parameter]["parameter"], value), parameter


def test_fresh_shards_layers_and_seeds_differ() -> None:
    found = train(FRESH["TP2"], [])
    for name, tensors in found.tensors.items():
        if "norm" in name:
            continue
        first, second = (found.shards[rank][name]["parameter"] for rank in (0, 1))
        assert not torch.equal(first, second), f"both halves of {name} are alike"
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if layer.isdigit():
            others = [found.tensors[f"layers.{other}.{rest}"]["parameter"] for other in range(int(layer))]
            assert not any(torch.equal(tensors["parameter"], other) for other in others), name
    other_seed = train(FRESH["TP2"], [], seed=8)
    assert not torch.equal(
        found.tensors["layers.0.wq.weight"]["parameter"],
        other_seed.tensors["layers.0.wq.weight"]["parameter"],
    )


# One rank sees NaN, others do not: some skip and some update, or the check comes after the update (O-62).


def at_step_two(rank: int, name: str, value: float) -> Callable[[Session], None]:
    """A `prepare`: an entry of the gradient of `name` becomes `value`, on `rank` alone, in step 2 alone."""

    def prepare(session: Session) -> None:
        def change(slot: ParameterSlot, gradient: Tensor, divisor: float) -> None:
            if session.world.rank == rank and session.iteration == 1 and slot.name == name:
                gradient.view(-1)[-1] = value

        alter_gradients(session, change)

    return prepare


def skipped_step(
    prepare: Callable[[Session], None], before_step: Callable[[Session, int], None] | None = None
) -> Any:
    """Three steps on HET4, the second one bad; its result, after checks that it left no trace."""
    kept: list[list[Tensor]] = []

    def keep(session: Session, step: int) -> None:
        kept.append(snapshot(session))
        if before_step:
            before_step(session, step)

    found = train(
        het4(), STEPS, prepare=prepare, before_step=keep, collect=lambda s: (kept, s.skipped_iterations)
    )
    for rank, ((_, before, after), skipped) in found.extra.items():
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            f"rank {rank}: the step left traces"
        )
        assert skipped == 1, f"rank {rank}"
    assert [bool(result.skipped) for result in found.results] == [False, True, False]
    assert_parity(without_step(found, 1), reference([STEPS[0], STEPS[2]]))
    return found.results[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (1, "layers.0.wq.weight"),  # a shard of a rank without the loss
        (1, "layers.2.mlp_norm.weight"),  # a copy that another rank counts in the norm
        (2, "head.weight"),
        (3, "layers.1.wk.weight"),  # the second pipeline, whose copies all count on the first
        (3, "final_norm.weight"),
    ],
)
def test_a_bad_gradient_on_one_rank_makes_all_ranks_skip(rank: int, name: str, value: float) -> None:
    result = skipped_step(at_step_two(rank, name, value))
    assert result.skipped == f"gradient not finite on rank {rank} ({name})"
    assert not math.isfinite(result.grad_norm)
    assert math.isfinite(result.loss)


def test_a_nan_in_the_forward_of_one_pipeline_makes_all_ranks_skip() -> None:
    """A weight is NaN during the step: NaN loss, and NaN gradients on every rank once they are summed."""
    spared: list[float] = []

    def poison(session: Session, step: int) -> None:
        if session.world.rank == 3 and step == 1:
            session.gather.finish()  # under ZeRO-1 the last update may still be on its way
            weight = session.state.parameters["final_norm.weight"].data
            spared.append(weight[5].item())
            weight[5] = math.nan

    def prepare(session: Session) -> None:
        def heal(slot: ParameterSlot, gradient: Tensor, divisor: float) -> None:
            if spared:
                session.state.parameters["final_norm.weight"].data[5] = spared.pop()

        alter_gradients(session, heal)

    result = skipped_step(prepare, poison)
    assert result.skipped.startswith("gradient not finite on rank 0 (")
    assert all(f"rank {rank} (" in result.skipped for rank in range(4))
    assert math.isnan(result.loss)
    assert math.isnan(result.grad_norm)


def test_a_nan_loss_with_finite_gradients_makes_all_ranks_skip() -> None:
    def prepare(session: Session) -> None:
        plain = session.stage.compute

        def compute(*arguments: Any) -> Tensor | None:
            loss = plain(*arguments)
            spoilt = session.world.rank == 3 and session.iteration == 1 and loss is not None
            return loss * math.nan if spoilt else loss

        session.stage.compute = compute

    result = skipped_step(prepare)
    assert result.skipped == "the loss is not finite"
    assert math.isnan(result.loss)
    assert math.isfinite(result.grad_norm)


def test_stopping_on_a_bad_gradient_raises_the_same_on_all_ranks() -> None:
    plan, model = het4(), Llama(T0)
    program = build(model, plan)

    def work(world: World) -> tuple[str, bool]:
        session = start(model, program, world, ADAM, torch.float32, 7)
        at_step_two(1, "layers.0.wq.weight", math.nan)(session)
        rows = (0, 1, 2) if world.rank < 3 else (3,)
        batches = [[micro_batch([step[row]], program.token_multiple(0)) for row in rows] for step in STEPS]
        session.step(batches[0], skip_nonfinite=False)
        before = snapshot(session)
        with pytest.raises(RuntimeFailure) as caught:
            session.step(batches[1], skip_nonfinite=False)
        untouched = all(torch.equal(a, b) for a, b in zip(before, snapshot(session), strict=True))
        return str(caught.value), untouched

    words = "iteration 2: gradient not finite on rank 1 (layers.0.wq.weight); no rank has updated its weights"
    assert run_ranks(plan.ranks, work, timeout_s=30) == dict.fromkeys(range(4), (words, True))


def test_stopping_on_a_bad_gradient_ends_the_whole_job(capfd: pytest.CaptureFixture[str]) -> None:
    def prepare(session: Session) -> None:
        at_step_two(3, "head.weight", math.inf)(session)
        plain = session.step
        session.step = lambda batches: plain(batches, skip_nonfinite=False)  # type: ignore[method-assign]

    with pytest.raises(RanksFailed) as caught:
        train(het4(), STEPS, prepare=prepare, timeout_s=30)
    assert caught.value.code == 1
    words = "error: iteration 2: gradient not finite on rank 3 (head.weight); no rank has updated its weights"
    assert capfd.readouterr().err.count(words) == 4, "every rank says why it ends"
