"""One weight for embedding and head, on the first and the last stage of pipelines of unequal degree and depth.

SGD where few micro-batches are left, because Adam blows up FP32 rounding.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import view
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Strategy
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    ADAM,
    T0,
    alter_gradients,
    assert_parity,
    build,
    het4,
    reference,
    sequences,
    stage,
    start,
    strategy,
    train,
)

TIED = replace(T0, tie_word_embeddings=True)
NAME = "embedding.weight"
D0 = sequences(24)
STEPS = [D0[at : at + 4] for at in (0, 4, 8)]

LAYOUTS = {
    "one rank": strategy((2, 2, [stage("0", "0-3")])),
    "TP2": strategy((2, 2, [stage("0-1", "0-3")])),
    "PP2": strategy((4, 1, [stage("0", "0-1"), stage("1", "2-3")])),
    "3 uneven stages": strategy((4, 1, [stage("0", "0-1"), stage("1", "2"), stage("2", "3")])),
    "TP2 > TP1 > TP4": strategy((4, 1, [stage("0-1", "0"), stage("2", "1-2"), stage("3-6", "3")])),
    "HET4": het4(),
    "embedding alone and head alone": strategy(
        (4, 1, [stage("0", None), stage("1", "0-3"), stage("2", None)])
    ),
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_with_one_weight_for_both_equal_one_device(name: str, sequence_parallel: bool) -> None:
    plan: Strategy = replace(LAYOUTS[name], sequence_parallel=sequence_parallel)
    found = train(plan, STEPS, TIED)
    assert "head.weight" not in found.tensors
    assert sum(tensors["parameter"].numel() for tensors in found.tensors.values()) == 40_224
    assert_parity(found, reference(STEPS, TIED))


# Shared embedding with pipeline and sharded optimizer (O-28).

FIVE_STEPS = [D0[at : at + 4] for at in range(0, 20, 4)]
SECOND = (2, 1, [stage("4", "0-2"), stage("5", "3")])
SHARED = {
    "TP1": strategy(
        (2, 1, [stage("0", "0-1"), stage("1", "2-3")]), (2, 1, [stage("2", "0-2"), stage("3", "3")])
    ),
    "a TP2 first stage": strategy((2, 1, [stage("0-1", "0-1"), stage("2", "2-3")]), SECOND, idle_ranks=(3,)),
    "a TP2 last stage": strategy((2, 1, [stage("0", "0-1"), stage("2-3", "2-3")]), SECOND, idle_ranks=(1,)),
}


def watch(seen: list[Tensor]) -> Any:
    """A `before_step` that keeps this rank's part of the shared weight in `seen`."""

    def before_step(session: Session, step: int) -> None:
        slot = next((s for s in session.state.parameter_slots if s.name == NAME), None)
        if slot is not None:
            seen.append(view(session.state.compute, slot).clone())

    return before_step


@pytest.mark.parametrize("name", SHARED)
def test_first_and_last_copies_stay_bit_equal_and_get_the_sum_of_both_gradients(name: str) -> None:
    plan: Strategy = SHARED[name]
    seen: list[Tensor] = []
    found = train(plan, FIVE_STEPS, TIED, before_step=watch(seen), collect=lambda _: seen)
    assert_parity(found, reference(FIVE_STEPS, TIED))
    stages = [each for pipeline in plan.pipelines for each in pipeline.stages]
    after = {rank: shards[NAME]["parameter"] for rank, shards in found.shards.items()}
    for step in range(1, 6):
        copies = [
            torch.cat([after[rank] if step == 5 else found.extra[rank][step] for rank in each.ranks])
            for each in stages
        ]
        assert all(torch.equal(copy, copies[0]) for copy in copies), f"copies differ after step {step}"
    assert not torch.equal(after[0], found.extra[0][0]), "the weight is trained"


@pytest.mark.parametrize("name", ["TP1", "a TP2 first stage"])
def test_the_shared_weight_counts_and_decays_once(name: str) -> None:
    settings = OptimizerSettings(name="sgd", lr=0.5, weight_decay=0.1)
    found = train(
        SHARED[name],
        STEPS[:1],
        TIED,
        settings,
        prepare=lambda session: alter_gradients(
            session, lambda slot, gradient, divisor: gradient.fill_(divisor)
        ),
    )
    assert found.norms[0] == pytest.approx(200.5592, abs=1e-3)  # the root of 40,224
    first = dict(Llama(TIED).materialize(7).named_parameters())[NAME].detach()
    torch.testing.assert_close(found.tensors[NAME]["parameter"], first * 0.95 - 0.5, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["one rank", "3 uneven stages"])
def test_both_layers_of_a_rank_that_has_both_hold_one_parameter(name: str) -> None:
    model = Llama(TIED)
    program = build(model, LAYOUTS[name])

    def work(world: World) -> Any:
        session = start(model, program, world, ADAM, torch.float32, 7)
        shard = session.state.parameters.get(NAME)
        runs = {node.name for chunk in program.executable(world.rank).chunks for node in chunk.nodes}
        return {own: getattr(model, own).weight is shard for own in ("embedding", "head") if own in runs}

    found = run_ranks(program.strategy.ranks, work)
    both, first, last = {"embedding": True, "head": True}, {"embedding": True}, {"head": True}
    assert list(found.values()) == ([both] if name == "one rank" else [first, {}, last])


def test_bf16_copies_of_the_shared_weight_are_one_rounding_of_one_master_weight() -> None:
    found = train(het4(), [D0[:4]] * 12, TIED, dtype=torch.bfloat16)
    wanted = reference([D0[:4]] * 12, TIED)
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2)
    tensors = found.tensors[NAME]
    assert torch.equal(tensors["parameter"], tensors["master"].bfloat16().float())
