"""Runs under churn: every second is counted once, by numbers worked out by hand; traces; policies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.churn import (
    Answer,
    Change,
    Outcome,
    Ranks,
    Saving,
    Work,
    daly_interval,
    replay,
)
from hetero_megatron.planner.churn_plans import Plans, renamed
from hetero_megatron.planner.churn_policies import (
    Ours,
    Phases,
    Restart,
    Starting,
    Templates,
    broadcast_seconds,
)
from hetero_megatron.planner.churn_trace import DEVICE, NODE, Trace, on_cluster, read_trace
from hetero_megatron.planner.plan import SAFE
from hetero_megatron.planner.problem import Problem
from hetero_megatron.strategy import Pipeline, Stage, Strategy


def work(ranks: Sequence[int]) -> Work:
    """20 s a step on one rank, 10 on two."""
    return Work(Strategy(tuple(Pipeline(1, 1, (Stage((rank,), (0, 0)),)) for rank in ranks)), 20 / len(ranks))


@dataclass(frozen=True)
class Simple:
    """All ranks do the same; with `keeps`, survivors have the state."""

    keeps: bool

    def concerned(self, work: Work, lost: Ranks) -> bool:
        return bool(lost & work.ranks)

    def begin(self, present: Ranks) -> Answer:
        return Answer(work(sorted(present)) if present else None, 5.0, True)

    def lose(self, present: Ranks, work: Work) -> Answer:
        found = self.begin(present)
        return Answer(found.work, 3.0) if self.keeps and present else found

    def join(self, present: Ranks, work: Work) -> Answer:
        found = self.begin(present)
        return Answer(found.work, 2.0) if self.keeps else replace(found, pause_seconds=9.0, write_seconds=4.0)


BOTH, SECOND = Ranks({0, 1}), Ranks({1})


def parts(found: Outcome) -> tuple[float, ...]:
    return found.useful, found.lost, found.paused, found.saving, found.waiting


def test_a_loss_costs_the_step_under_way_and_a_pause_and_a_join_only_a_pause() -> None:
    """Steps end at 15, 25 | 7 s cut off, pause to 35 | 55, 75, 95, 115 | pause to 117 | 127, 137, 147."""
    changes = (Change(0.0, joined=BOTH), Change(32.0, lost=SECOND), Change(100.0, joined=SECOND))
    found = replay(changes, 150.0, Simple(True))
    assert found.steps == 2 + 4 + 3
    assert parts(found) == pytest.approx((20 + 80 + 30, 7 + 3, 5 + 3 + 2, 0, 0))
    assert found.seconds == pytest.approx(150.0)
    assert (found.recoveries, found.restarts, found.joins) == (1, 0, 1)


def test_a_restart_goes_back_to_the_newest_checkpoint_that_is_complete() -> None:
    """Saves begin at 25 (complete at 30) and 46 (complete at 51); the loss is at 50, in the fifth step."""
    changes = (Change(0.0, joined=BOTH), Change(50.0, lost=SECOND))
    found = replay(changes, 80.0, Simple(False), Saving(20.0, 1.0, 4.0))
    assert found.steps == 2 + 1
    assert parts(found) == pytest.approx((20 + 20, 3 + 20 + 4, 5 + 5, 1 + 1 + 1, 0))
    assert (50.0, 4) in found.curve
    assert (50.0, 2) in found.curve
    assert (found.recoveries, found.restarts, found.joins) == (0, 1, 0)


def test_a_planned_restart_loses_nothing_once_its_checkpoint_is_written() -> None:
    """One rank: steps end at 25, 45; a join at 30 is taken in at 45, with a checkpoint until 49 and a start until 54."""
    joined = (Change(0.0, joined=Ranks({0})), Change(30.0, joined=SECOND))
    assert replay(joined, 64.0, Simple(False)).steps == 3
    # A loss at 52 finds the checkpoint, one at 47 does not: it falls back to the beginning.
    assert replay((*joined, Change(52.0, lost=SECOND)), 57.0, Simple(False)).steps == 2
    found = replay((*joined, Change(47.0, lost=SECOND)), 52.0, Simple(False))
    assert found.steps == 0
    assert parts(found) == pytest.approx((0, 40, 5 + 2 + 5, 0, 0))


def test_a_loss_in_the_middle_of_a_recovery_begins_it_anew() -> None:
    """The second loss comes 1 s into the pause of the first: 3 s from then on."""
    everyone = Ranks({0, 1, 2, 3})
    changes = (
        Change(0.0, joined=everyone),
        Change(12.0, lost=Ranks({3})),
        Change(13.0, lost=Ranks({2})),
    )
    found = replay(changes, 26.0, Simple(True))
    assert (found.steps, found.recoveries) == (1 + 1, 2)
    assert parts(found) == pytest.approx((5 + 10, 2, 5 + 1 + 3, 0, 0))


def test_without_devices_a_run_waits_and_loses_what_was_not_saved() -> None:
    changes = (
        Change(2.0, joined=BOTH),
        Change(20.0, lost=BOTH),
        Change(30.0, joined=BOTH),
    )
    found = replay(changes, 50.0, Simple(True))
    assert parts(found) == pytest.approx((10, 10 + 3 + 5, 5 + 5, 0, 2 + 10))
    assert (found.steps, found.restarts) == (1, 1)


def test_the_best_interval_grows_with_the_stall_and_the_time_between_losses() -> None:
    assert daly_interval(2.0, 0.0, 3600.0) == pytest.approx(118.7, abs=0.1)
    assert daly_interval(2.0, 300.0, 3600.0) == 300.0, "a save must be complete before the next one"
    assert daly_interval(100.0, 0.0, 10.0) == 10.0


CSV = """0,add,a
0,add,b
0,add,c
60000,remove,a
60000,add,d
90000,remove,b
"""


def trace(folder: Path, text: str, suffix: str = ".csv") -> Trace:
    path = folder / f"trace{suffix}"
    path.write_text(text)
    return read_trace(path)


def test_machines_take_the_lowest_free_place(tmp_path: Path) -> None:
    found = trace(tmp_path, CSV)
    assert (found.places, found.seconds) == (3, 90.0)
    none = frozenset[int]()
    assert found.changes == (
        (0.0, none, frozenset({0, 1, 2})),
        (60.0, frozenset({0}), frozenset({0})),
        (90.0, frozenset({1}), none),
    )


def test_counts_become_places(tmp_path: Path) -> None:
    text = '[{"Time": 5, "GPUs": 3}, {"Time": 68, "GPUs": 1}, {"Time": 131, "GPUs": 2}]'
    found = trace(tmp_path, text, ".json")
    assert (found.places, found.seconds) == (3, 126.0)
    there: set[int] = set()
    counts = []
    for _, freed, taken in found.changes:
        assert freed <= there
        assert not taken & (there - freed)
        there = (there - freed) | taken
        counts.append(len(there))
    assert counts == [3, 1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [("0,vanish,a\n", "is no trace: 'vanish' is neither add nor remove"), ("", "has no change in it")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        trace(tmp_path, text)


def test_a_trace_with_fewer_machines_than_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="a trace of 3 machines is too small for 4 nodes"):
        on_cluster(trace(tmp_path, CSV), Cluster.of_nodes({"h20": 4}))


def test_nodes_follow_places(tmp_path: Path) -> None:
    """Two nodes of 2 follow places 0 and 1 of 3; a machine that is replaced has lost what it held."""
    cluster = Cluster.of_nodes({"h20": 2}, per_node=2)
    first, second, everyone = Ranks({0, 1}), Ranks({2, 3}), Ranks({0, 1, 2, 3})
    assert on_cluster(trace(tmp_path, CSV), cluster, NODE) == (
        Change(0.0, joined=everyone),
        Change(60.0, lost=first),
        Change(60.0, joined=first),
        Change(90.0, lost=second),
    )
    assert on_cluster(trace(tmp_path, CSV), cluster, DEVICE) == (
        Change(0.0, joined=everyone),
        Change(60.0, lost=Ranks({0})),
        Change(60.0, joined=Ranks({0})),
        Change(90.0, lost=Ranks({2})),
    )


CONFIG = replace(PRESETS["llama_7b"], num_layers=16)
PHASES = Phases(0.1, 0.1, 0.1, 0.1, 0.1, 0.5)
STARTING = Starting(60.0, 10.0, 10.0)


@lru_cache
def plans() -> Plans:
    """Three nodes of two H20 and one of two H800."""
    return Plans(Problem(CONFIG, Cluster.of_nodes({"h800": 1, "h20": 3}, per_node=2), 16, 2048))


def test_equal_shapes_are_planned_once_and_get_their_own_ranks() -> None:
    own = Plans(plans().full)
    assert own.prepare([Ranks({2, 3, 4, 5}), Ranks({4, 5, 6, 7}), Ranks()], 1) == 1
    one, other = own.of(Ranks({2, 3, 4, 5})).redundant, own.of(Ranks({4, 5, 6, 7})).redundant
    assert one is not None
    assert other is not None
    assert (one.ranks, other.ranks) == (Ranks({2, 3, 4, 5}), Ranks({4, 5, 6, 7}))
    assert renamed(one.strategy, {2: 4, 3: 5, 4: 6, 5: 7}) == other.strategy


def test_ours_goes_on_with_all_survivors_and_takes_all_in_again() -> None:
    own = Ours(plans(), PHASES, STARTING, 900.0)
    everyone = Ranks(range(8))
    begun = own.begin(everyone)
    assert begun.work is not None
    assert len(begun.work.strategy.pipelines) > 1
    assert begun.pause_seconds == 70.0
    answer = own.lose(everyone - {7}, begun.work)
    assert answer.work is not None
    assert not answer.from_checkpoint
    assert answer.work.ranks <= everyone - {7}
    assert PHASES.total <= answer.pause_seconds < STARTING.launch
    back = own.join(everyone, answer.work)
    assert back is not None
    assert back.work is not None
    # The plan that a run begins with outlives every node and may be up to SAFE slower than the fastest.
    assert begun.work.step_seconds / SAFE < back.work.step_seconds < 1.02 * begun.work.step_seconds
    nothing = own.lose(Ranks(), begun.work)
    assert nothing.work is None


def test_a_restart_takes_devices_in_when_that_pays() -> None:
    everyone, few = Ranks(range(8)), Ranks({2, 3})
    for plan in ("even", "fastest"):
        patient, hasty = (Restart(plans(), STARTING, horizon, plan) for horizon in (1e6, 10.0))
        begun = patient.begin(few)
        assert begun.work is not None
        assert begun.from_checkpoint
        answer = patient.join(everyone, begun.work)
        assert answer is not None
        assert (answer.pause_seconds, answer.write_seconds) == (80.0, 10.0)
        assert hasty.join(everyone, begun.work) is None


def test_templates_give_up_a_node_that_lost_a_device() -> None:
    own = Templates(plans(), PHASES, STARTING, 900.0)
    everyone = Ranks(range(8))
    begun = own.begin(everyone).work
    assert begun is not None
    assert own.concerned(begun, Ranks({7}))
    answer = own.lose(everyone - {7}, begun)
    assert answer.work is not None
    assert not answer.work.ranks & {6, 7}
    assert not answer.from_checkpoint
    assert not own.concerned(answer.work, Ranks({6})), "it is not in use any more"


def test_a_broadcast_takes_as_long_as_its_busiest_sender() -> None:
    """Ranks 0, 1 hold layers 0, 1; rank 4 of 4 and 5 lacks both: each sender has half of two layers to send."""
    cluster = Cluster.of_nodes({"h20": 3}, per_node=2)
    one, other, third = (Pipeline(1, 1, (Stage(ranks, (0, 1), 2),)) for ranks in ((0, 1), (2, 3), (4, 5)))
    before, after = Strategy((one, other)), Strategy((one, third))
    present = Ranks({0, 1, 4, 5})
    assert broadcast_seconds(before, after, present, 45e9, cluster) == pytest.approx(1.0)
    assert broadcast_seconds(before, before, present, 45e9, cluster) == 0.0
