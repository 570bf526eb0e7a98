"""Global gradient norm and clipping: every element counts once, and one factor is applied everywhere.

Just before the norm is taken all gradients are overwritten with one value, so that the norm follows from the
number of distinct parameters alone: sqrt(43,296) = 208.0769 for ones. `train` compares all copies that ranks
hold, so a statement about the full tensors is one about every rank.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    T0,
    Outcome,
    alter_gradients,
    het3,
    het4,
    sequences,
    stage,
    strategy,
    train,
)

STEP = [sequences(4)]
CLIPPED = OptimizerSettings(name="sgd", lr=1.0, clip_grad=1.0)
TP1 = strategy((2, 2, [stage("0", "0-3")]))
TP4 = strategy((2, 2, [stage("0-3", "0-3")]))
PP4 = strategy((2, 2, [stage(str(rank), str(rank)) for rank in range(4)]))
UNEVEN_STAGES = [stage("0", "0-2"), stage("1", "3")]


def all_gradients(value: float) -> Callable[[Session], None]:
    """A `prepare` that makes every element of the mean gradient `value`."""

    def prepare(session: Session) -> None:
        alter_gradients(session, lambda slot, gradient, divisor: gradient.fill_(value * divisor))

    return prepare


def steps_taken(found: Outcome) -> Tensor:
    """How far SGD at rate 1 moved every parameter: the gradient after clipping."""
    first = dict(build_single_device(T0, seed=7).named_parameters())
    return torch.cat([(first[name].detach() - t["parameter"]).flatten() for name, t in found.tensors.items()])


# Copied parameters counted once per tensor-parallel rank, or a shard left out (O-24).


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "pipelines",
    [
        TP1,
        strategy((2, 2, [stage("0-1", "0-3")])),
        TP4,
        het3(),
        het4(),
        strategy((1, 2, [stage("0-1", "0-3")]), (1, 2, [stage("2-3", "0-3")])),
    ],
    ids=["TP1", "TP2", "TP4", "HET3", "HET4", "DP2 x TP2"],
)
def test_every_parameter_counts_once_in_the_norm(pipelines: Strategy, sequence_parallel: bool) -> None:
    plan = Strategy(pipelines.pipelines, sequence_parallel=sequence_parallel)
    found = train(plan, STEP, settings=CLIPPED, prepare=all_gradients(1.0))
    assert found.norms[0] == pytest.approx(208.0769, abs=1e-3)
    moved = steps_taken(found)
    assert moved.numel() == 43_296
    torch.testing.assert_close(moved, torch.full_like(moved, 1 / 208.0769), rtol=0, atol=1e-6)


# Every pipeline stage clips by the norm of its own modules (O-25).


@pytest.mark.parametrize(
    "plan",
    [
        strategy((4, 1, UNEVEN_STAGES)),
        strategy((2, 1, UNEVEN_STAGES), (2, 1, [stage("2", "0"), stage("3", "1-2"), stage("4", "3")])),
    ],
    ids=["one pipeline", "a second pipeline of another depth"],
)
def test_all_stages_clip_by_the_one_global_norm(plan: Strategy) -> None:
    moved = steps_taken(train(plan, STEP, settings=CLIPPED, prepare=all_gradients(1.0)))
    torch.testing.assert_close(moved, torch.full_like(moved, 0.0048059), rtol=0, atol=1e-6)


# The small constant in max_norm / (norm + 1e-6) added once per rank (O-26).


@pytest.mark.parametrize("plan", [TP1, TP4, PP4, het4()], ids=["one rank", "TP4", "PP4", "HET4"])
def test_the_stabiliser_of_clipping_is_added_once_to_the_global_norm(plan: Strategy) -> None:
    value = 3e-6 / 208.0769

    def prepare(session: Session) -> None:
        session.state.master.zero_()  # so that steps of 1e-9 are not rounded away
        all_gradients(value)(session)

    found = train(plan, STEP, settings=OptimizerSettings(name="sgd", lr=1.0, clip_grad=1e-6), prepare=prepare)
    assert found.norms[0] == pytest.approx(3e-6, rel=1e-5)
    for name, tensors in found.tensors.items():
        factor = -tensors["parameter"] / value
        torch.testing.assert_close(
            factor, torch.full_like(factor, 0.25), rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
