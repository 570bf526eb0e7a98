"""A replica leaves, comes back, or loses a rank: what a step means must not depend on how many replicas there are.

Static form: every strategy is a run of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.annotation.region import Bounds
from hetero_megatron.report import log_line
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import view
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    ADAM,
    T0,
    alter_gradients,
    assert_parity,
    reference,
    sequences,
    stage,
    strategy,
    train,
    zero_head,
)

# Logged loss jumps when a replica leaves: normalised losses summed over the living ones (O-23).

D0 = sequences(24)
FIRST = (2, 2, [stage("0-1", "0-2"), stage("2", "3")])
BOTH = strategy(FIRST, (1, 2, [stage("3", "0-3")]))
ALONE = strategy(FIRST, idle_ranks=(3,))


def test_the_logged_loss_is_the_same_without_the_second_pipeline_and_with_it_again() -> None:
    """The learning rate is 0, so that three runs are one run of six steps."""
    still = OptimizerSettings(name="sgd", lr=0.0)
    losses, lines = [], []
    for run, plan in enumerate((BOTH, ALONE, BOTH)):
        steps = [D0[at : at + 4] for at in (8 * run, 8 * run + 4)]
        found = train(plan, steps, settings=still, prepare=zero_head)
        losses += found.losses
        lines += [log_line(result, 6, 4, 0, "") for result in found.results]
    assert losses == pytest.approx([4.564348] * 6, abs=1e-6)
    assert losses == pytest.approx([math.log(96)] * 6, abs=1e-6)
    assert all("| lm loss: 4.564348E+00 |" in line for line in lines)


# A replica with one rank less in its tensor-parallel group (O-68).

ODD = replace(T0, vocab_size=97)
DOCUMENTS = sequences(20, vocab=97)
FIVE_STEPS = [DOCUMENTS[at : at + 4] for at in range(0, 20, 4)]
SECOND = (1, 2, [stage("2-3", "0-3")])
REPLICAS = {
    "TP2 and TP2": strategy((1, 2, [stage("0-1", "0-3")]), SECOND),
    "TP1 and TP2": strategy((1, 2, [stage("0", "0-3")]), SECOND, idle_ranks=(1,)),
}

# At rate 1e-2, FP32 rounding alone moves a weight by 1.4e-6 in five steps of Adam (one process against FP64).
SLOW_ADAM = replace(ADAM, lr=1e-3)

Shards = Mapping[str, tuple[Bounds, Tensor]]


def shards_of(session: Session) -> Shards:
    """This rank's parameters, with their places in the whole ones."""
    state = session.state
    return {slot.name: (slot.bounds, view(state.compute, slot).clone()) for slot in state.parameter_slots}


def gathered(parts: list[Shards]) -> dict[str, Tensor]:
    """The whole parameters of one pipeline."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, (bounds, shard) in part.items():
            size = [max(other[name][0][dim][1] for other in parts) for dim in range(shard.ndim)]
            whole.setdefault(name, torch.full(size, math.nan))[tuple(slice(lo, hi) for lo, hi in bounds)] = (
                shard
            )
    return whole


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_of_equal_and_of_unequal_degree_are_bit_equal_after_each_step(name: str) -> None:
    plan: Strategy = REPLICAS[name]
    seen: list[Shards] = []

    def collect(session: Session) -> Any:
        return [*seen, shards_of(session)]

    found = train(
        plan,
        FIVE_STEPS,
        ODD,
        SLOW_ADAM,
        before_step=lambda session, step: seen.append(shards_of(session)),
        collect=collect,
    )
    assert_parity(found, reference(FIVE_STEPS, ODD, SLOW_ADAM))
    for step in range(6):
        first, second = (
            gathered([found.extra[rank][step] for rank in pipeline.stages[0].ranks])
            for pipeline in plan.pipelines
        )
        assert first.keys() == second.keys() == found.tensors.keys()
        for parameter, value in first.items():
            assert torch.equal(value, second[parameter]), f"{parameter} after step {step}"
    start, end = found.extra[2][0], found.extra[2][5]
    assert not any(torch.equal(start[parameter][1], end[parameter][1]) for parameter in start)


@pytest.mark.parametrize("name", REPLICAS)
def test_the_norm_of_ones_is_the_same_with_a_rank_less(name: str) -> None:
    found = train(
        REPLICAS[name],
        FIVE_STEPS[:1],
        ODD,
        prepare=lambda session: alter_gradients(
            session, lambda slot, gradient, divisor: gradient.fill_(divisor)
        ),
    )
    assert found.norms[0] == pytest.approx(math.sqrt(43_360), abs=1e-4)
