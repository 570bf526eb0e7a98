"""Strategies that take turns over one layout of optimizer states: only parameters are gathered anew (paper §7, §8)."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import RuntimeFailure, StrategyError
from hetero_megatron.graph.annotated import STATE
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS
from hetero_megatron.runtime.state import State
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Strategy
from tests.distributed.ranks import run_ranks
from tests.distributed.switching import Shards, initial_of, model_maker, run_steps, whole
from tests.distributed.training import (
    ADAM,
    T0,
    Outcome,
    assert_parity,
    build,
    het4,
    reference,
    sequences,
    stage,
    strategy,
)
from tests.runtime.flat import state_of

SETTINGS = replace(ADAM, lr=1e-3)
STEPS = [sequences(6, seed=step) for step in range(6)]
SHORT = strategy(*((2, 1, [stage(str(rank), "0-3")]) for rank in (0, 1, 2)), zero=1)
LONG = strategy((3, 2, [stage("0-1", "0-2"), stage("2", "3")]))
PIPE = strategy((3, 2, [stage("2", "0"), stage("0", "1-2"), stage("1", "3")]))
FOUR = {
    "HET4": het4((2, 2), (1, 2)),
    "TP2xPP2": strategy((3, 2, [stage("0-1", "0-1"), stage("2-3", "2-3")])),
    "CP2xTP2": strategy((3, 2, [stage("0-3", "0-3", cp=2)])),
}


def programs_of(plans: dict[str, Strategy]) -> dict[str, Program]:
    """All with the states of the first."""
    model = Llama(T0)
    graph, cluster = trace(model), Cluster.local_cpu(4)
    idle = {name: tuple({0, 1, 2, 3} - set(plan.ranks)) for name, plan in plans.items()}
    whole_plans = {name: replace(plan, idle_ranks=idle[name]) for name, plan in plans.items()}
    first, *others = whole_plans
    made = {first: Program.build(graph, whole_plans[first], T0.facts, cluster)}
    states = made[first].annotated.states
    return made | {
        name: Program.build(graph, whole_plans[name], T0.facts, cluster, states) for name in others
    }


@pytest.mark.parametrize(
    ("plans", "dtype", "buckets"),
    [
        ({"short": SHORT, "long": LONG, "pipe": PIPE}, torch.float32, 1 << 30),
        ({"long": LONG, "short": SHORT, "pipe": PIPE}, torch.bfloat16, 3000),
        (FOUR, torch.float32, 4000),
    ],
    ids=["states of ZeRO-1", "states of an uneven pipeline, BF16", "four ranks"],
)
def test_strategies_share_states_and_train_one_model(
    plans: dict[str, Strategy], dtype: torch.dtype, buckets: int
) -> None:
    programs = programs_of(plans)
    names = list(plans)
    turns = [names[0], names[1], names[2], names[0], names[2], names[1]]

    def work(world: World) -> Any:
        run = Switcher(
            programs,
            world,
            model_maker(T0),
            initial_of(T0),
            SETTINGS,
            dtype,
            bucket_elements=buckets,
            share_states=True,
        )
        run.prepare()
        results, kept = [], list[tuple[Shards, Shards]]()
        sizes = []
        for name, documents in zip(turns, STEPS, strict=True):
            if name != run.active:
                assert run.session is not None
                held = run.session.shards()
                report = run.switch(name)
                assert report.sent == {}
                kept.append((held, run.session.shards()))
                sizes.append(report.moved_bytes)
            assert run.session is not None
            state = run.session.state
            assert state.master is run.sessions[names[0]].state.master
            (result,), end = run_steps(run.session, [documents])
            results.append(result)
        counters = run.session.iteration, run.session.state.step
        others = [each.state for name, each in run.sessions.items() if name != turns[-1]]
        freed = all(not each.flats[own].untyped_storage().nbytes() for each in others for own in each.own)
        return results, kept, end, counters, freed, sizes

    found = run_ranks(sorted(programs[names[0]].strategy.ranks), work)
    outcome = Outcome()
    for result in found[0][0]:
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    for place, (old, new) in enumerate(pairwise(turns)):
        for kind in (MASTER, *MOMENTS):
            held = whole(programs[old], {rank: each[1][place][0] for rank, each in found.items()}, [kind])
            got = whole(programs[new], {rank: each[1][place][1] for rank, each in found.items()}, [kind])
            for name in held:
                assert torch.equal(held[name][kind], got[name][kind]), f"{old} -> {new}: {kind} of {name}"
        got = whole(
            programs[new], {rank: each[1][place][1] for rank, each in found.items()}, ["parameter", MASTER]
        )
        for name, each in got.items():
            assert torch.equal(each["parameter"], each[MASTER].to(dtype).float()), f"{old} -> {new}: {name}"
    for _, _, _, counters, freed, sizes in found.values():
        assert (counters, freed) == ((6, 6), True)
        assert sizes[0] == sum(
            sum(
                plan.bytes_sent(
                    programs[turns[1]].annotated.graph.parameter_shape(name), dtype.itemsize
                ).values()
            )
            for name, plan in programs[turns[1]].pres.items()
        )
    if dtype is torch.float32:
        outcome.tensors = whole(
            programs[turns[-1]], {rank: each[2] for rank, each in found.items()}, ("parameter", "gradient")
        )
        assert_parity(outcome, reference(STEPS, settings=SETTINGS))
    else:
        wanted = reference(STEPS, settings=SETTINGS)
        assert outcome.losses == pytest.approx(wanted.losses, rel=1e-2)


def test_states_of_another_strategy_are_written_into_the_plan_where_they_differ() -> None:
    programs = programs_of({"long": LONG, "pipe": PIPE})
    for name, program in programs.items():
        assert program.annotated.states == programs["long"].annotated.states
        assert any(key.endswith(STATE) for key in program.plan) == (name == "pipe")


def test_ranks_that_hold_states_have_to_work() -> None:
    with pytest.raises(
        StrategyError, match="rank 2 holds optimizer states, but works in no pipeline of this strategy"
    ):
        programs_of({"long": LONG, "two": strategy((1, 6, [stage("0-1", "0-3")]))})


def test_programs_with_states_in_different_places_cannot_share_them() -> None:
    plans = {
        "one": strategy((1, 2, [stage("0", "0-3")])),
        "other": strategy((1, 2, [stage("1", "0-3")]), idle_ranks=(0,)),
    }
    programs = {name: build(Llama(T0), plan) for name, plan in plans.items()}

    def work(world: World) -> str:
        with pytest.raises(RuntimeFailure) as caught:
            Switcher(programs, world, model_maker(T0), initial_of(T0), SETTINGS, share_states=True)
        return str(caught.value)

    text = (
        "strategies 'one' and 'other' do not share optimizer states: embedding.weight is on (0){} and on (1){}; "
        "build one with the states of the other"
    )
    assert set(run_ranks((0, 1), work).values()) == {text}


def test_buffers_of_another_layout_cannot_be_shared() -> None:
    text = "two programs cannot share optimizer states: their layouts differ; give both the same states"
    with pytest.raises(RuntimeFailure, match=text):
        State(state_of({"a.weight": (3, 2)}).buckets, torch.float32, torch.device("cpu"), shared=state_of())
