"""A run changes its strategy on the way (O-43, O-56, O-68)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.llama import Llama
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.small_batches import SmallBatchCosts
from hetero_megatron.runtime.move import Moves
from hetero_megatron.runtime.optimizer import squared_norm
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.switch import switch
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.switch_plan import switch_between
from tests.distributed.courses import gathered, go_on, run_course
from tests.distributed.ranks import run_ranks
from tests.distributed.switching import (
    batches_of,
    initial_of,
    model_maker,
    outcome_of,
    run_pairs,
    run_steps,
    whole,
)
from tests.distributed.training import (
    ADAM,
    T0,
    Outcome,
    assert_parity,
    build,
    het3,
    reference,
    sequences,
    stage,
    strategy,
)


def test_o_43_a_run_over_both_strategies_trains_one_model() -> None:
    """B pads to a multiple of 2 and takes 15, which makes 14: 14 and 12 go to B, 15 and 31 to A."""
    lengths = (14, 15, 12, 31, 13)
    steps = [sequences(2, length, seed=length) for length in lengths]
    plans = {
        "A": strategy((1, 2, [stage("0", "0-1"), stage("1", "2-3")])),
        "B": strategy((2, 1, [stage("0-1", "0-3")])),
    }
    programs = {name: build(Llama(T0), plan) for name, plan in plans.items()}
    named = [NamedStrategy("A", plans["A"]), NamedStrategy("B", plans["B"], 15)]
    chooser = StepChooser(named, SmallBatchCosts(T0, Cluster.local_cpu(2), None, 64, "fp32"), 0.0)
    assert [program.token_multiple(0) for program in programs.values()] == [1, 2]

    def work(world: World) -> Any:
        run = Switcher(programs, world, model_maker(T0), initial_of(T0), replace(ADAM, lr=1e-3), active="B")
        losses, norms, chosen = [], [], []
        for length, documents in zip(lengths, steps, strict=True):
            chosen.append(named[chooser.choose([length] * 2).strategy].name)
            if chosen[-1] != run.active:
                run.switch(chosen[-1])
            assert run.session is not None
            result = run.session.step(batches_of(run.session.program, world.rank, documents))
            losses.append(result.loss)
            norms.append(result.grad_norm)
        return chosen, losses, norms

    wanted = reference(steps, settings=replace(ADAM, lr=1e-3))
    for chosen, losses, norms in run_ranks((0, 1), work).values():
        assert chosen == ["B", "A", "B", "A", "B"]
        assert_parity(Outcome(losses, norms), replace(wanted, tensors={}))


def test_o_56_a_live_switch_and_a_file_give_the_same_bits(tmp_path: Path) -> None:
    """Five Adam steps on TP2xPP2, a sixth on HET3: with moments that were reset, weights would differ by about lr."""
    steps = [sequences(6, seed=step) for step in range(6)]
    first = strategy((3, 2, [stage("0-1", "0-1"), stage("2-3", "2-3")]))
    plans = {"first": first, "second": het3()}
    course = run_course(first, steps, 5, tmp_path)
    from_file = go_on(course, het3())
    programs, ((courses),) = run_pairs(plans, [("first", "second")], steps, before=5)
    saved = gathered(course.plan, course.held)
    moved = whole(programs["second"], {rank: each.got for rank, each in courses.items()})
    for name, tensors in saved.items():
        for kind, tensor in tensors.items():
            assert torch.equal(moved[name][kind], tensor), f"{kind} of {name}"
            assert moved[name][kind].dtype is torch.float32
    assert {courses[rank].counters for rank in (0, 1, 2)} == {(5, 0, 5)}
    live = outcome_of(programs["second"], courses)
    assert [each.iteration for each in courses[0].results] == [6]
    assert_parity(live, course.rest)
    assert live.losses == from_file.losses
    for name, tensors in live.tensors.items():
        assert torch.equal(tensors["parameter"], from_file.tensors[name]["parameter"]), name


def element_norm(session: Session) -> float:
    """The global norm of gradients that are 1 everywhere: every element once."""
    session.state.gradient.fill_(1.0)
    total = squared_norm(session.state).reshape(1)
    dist.all_reduce(total, group=session.world.group)
    return float(total) ** 0.5


def test_o_68_a_replica_goes_on_with_a_rank_less_in_its_tensor_parallel_group() -> None:
    """Rank 1 is gone; ranks 0, 2 and 3 go on in the same processes, without a word from it."""
    config, settings = replace(T0, vocab_size=97), replace(ADAM, lr=1e-3)
    steps = [sequences(4, vocab=97, seed=step) for step in range(5)]
    second = (1, 2, [stage("2-3", "0-3")])
    programs = {
        "before": build(Llama(config), strategy((1, 2, [stage("0-1", "0-3")]), second)),
        "after": build(Llama(config), strategy((1, 2, [stage("0", "0-3")]), second, idle_ranks=(1,))),
    }
    before, after = programs.values()
    make = model_maker(config)

    def work(world: World) -> Any:
        groups = Groups.of(world, [before, after])
        old = Session(before, world, make(), initial_of(config), settings, groups=groups)
        results, held = run_steps(old, steps[:2])
        norm = element_norm(old)
        if world.rank == 1:
            return results, held, None, norm, None
        survivors = groups.within((0, 2, 3))
        new = Session(after, world, make(), None, settings, groups=groups)
        plan = switch_between(before, after, lost=frozenset({1}))
        report = switch(Moves(plan, survivors, old.state, new.state), survivors, old, new)
        planned = sum(plan.bytes_sent().get(world.rank, {}).values())
        assert sum(report.sent.values()) == planned
        again = element_norm(new)
        got = new.shards()
        more, end = run_steps(new, steps[2:])
        return results + more, held, got, (norm, again), end

    found = run_ranks((0, 1, 2, 3), work)
    held = whole(before, {rank: each[1] for rank, each in found.items()})
    living = {rank: each for rank, each in found.items() if rank != 1}
    got = whole(after, {rank: each[2] for rank, each in living.items()})
    for name, tensors in held.items():
        for kind, tensor in tensors.items():
            assert torch.equal(got[name][kind], tensor), f"{kind} of {name}"
    elements = sum(tensors["parameter"].numel() for tensors in held.values())
    for each in living.values():
        assert each[3] == pytest.approx((elements**0.5, elements**0.5), rel=1e-6)
    ends = {rank: each[4] for rank, each in living.items()}
    outcome = Outcome(tensors=whole(after, ends, ("parameter", "gradient")))
    for result in found[0][0]:
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    assert_parity(outcome, reference(steps, config, settings))
