"""What a run with several programs refuses, and what its ranks hold."""

import re
from typing import Any

import pytest
import torch

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.switch import SwitchReport, switch
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.distributed.switching import batches_of, initial_of, model_maker
from tests.distributed.training import ADAM, T0, build, sequences, stage, strategy

ONE, OTHER = strategy((1, 2, [stage("0", "0-3")])), strategy((1, 2, [stage("1", "0-3")]), idle_ranks=(0,))
PROGRAMS = {name: build(Llama(T0), plan) for name, plan in (("one", ONE), ("other", OTHER))}


def switcher(world: World, *names: str, **options: Any) -> Switcher:
    programs = {name: PROGRAMS[name] for name in names}
    return Switcher(programs, world, model_maker(T0), initial_of(T0), ADAM, **options)


def refusal(act: Any) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        act()
    return str(caught.value)


def test_a_rank_that_joins_takes_everything_over_and_one_that_left_can_do_nothing() -> None:
    def work(world: World) -> Any:
        run = switcher(world, "one", "other")
        run.prepare()
        documents = sequences(2)
        texts = [
            refusal(lambda: run.switch("third")),
            refusal(lambda: run.switch("one")),
        ]
        first = run.session
        if first:
            first.step(batches_of(PROGRAMS["one"], 0, documents))
        report = run.switch("other")
        if first:
            batches = batches_of(PROGRAMS["one"], 0, documents)
            texts += [refusal(lambda: first.step(batches)), refusal(lambda: first.evaluate(batches))]
            texts.append(refusal(first.shards))
        taken = None
        if run.session:
            taken = run.session.step(batches_of(PROGRAMS["other"], 1, documents)).iteration
        return texts, str(report), taken, sorted(run.sessions)

    found = run_ranks((0, 1), work, 30)
    unknown = "strategy 'third' is unknown; this run has one, other"
    same = "strategy 'one' is active already: there is nothing to switch"
    gone = "rank 0: this session has no memory, its state is with the session that the run has switched to"
    assert found[0][0] == [unknown, same, gone, gone, gone]
    assert found[1][0] == [unknown, same]
    assert (found[0][2], found[1][2]) == (None, 2)
    assert (found[0][3], found[1][3]) == (["one"], ["other"])
    line = found[0][1]
    moved = f"{12 * 43_296 / 1e6:.2f} MB"
    assert line == found[1][1]
    assert line.startswith(f"{moved} moved, rank 0 the slowest sender with {moved}, in ")
    assert re.search(r"\(pack \S+, move \S+, unpack \S+, gather \S+\)$", line)


def test_nothing_moved_is_said_without_a_sender() -> None:
    report = SwitchReport(0, None, {"pack": 0.25, "total": 0.5}, {})
    assert str(report) == "0.00 MB moved, in 0.500 s (pack 0.250)"


def test_programs_and_ranks_of_another_run_are_refused() -> None:
    def work(world: World) -> Any:
        return refusal(lambda: switcher(world, "one", "other")), refusal(lambda: switcher(world))

    (found,) = run_ranks((0,), work, 30).values()
    assert found == (
        "strategy 'other' uses rank 1, which is no process of this run; ranks (0,)",
        "a run needs at least one program",
    )


def test_a_switch_that_keeps_the_old_state_can_be_begun_again() -> None:
    def work(world: World) -> Any:
        run = switcher(world, "one", "other")
        before, after = run.sessions.get("one"), run.sessions.get("other")
        if before:
            before.step(batches_of(PROGRAMS["one"], 0, sequences(2)))
        moves = run.moves("one", "other")
        switch(moves, world, before, after, keep=True)
        first = after.shards() if after else {}
        if after:
            after.state.master.zero_()
        switch(moves, world, before, after)
        again = after.shards() if after else {}
        held = (
            None if before is None else sum(f.untyped_storage().nbytes() for f in before.state.flats.values())
        )
        same = all(
            torch.equal(again[n][kind], first[n][kind]) for n in first for kind in ("master", "exp_avg")
        )
        return same, len(first), held

    found = run_ranks((0, 1), work, 30)
    assert found[1][0]
    assert found[1][1] == len(PROGRAMS["one"].annotated.graph.parameters)
    assert found[0][2] == 0
