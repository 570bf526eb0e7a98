"""Times and bubbles of schedules (paper §6.3)."""

from math import inf

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.schedule import SCHEDULES, gpipe, one_f_one_b
from hetero_megatron.pipeline.timing import clock

SECONDS = {"F": 1.0, "B": 2.0}


def unit(_pipeline: int, _stage: int, kind: str) -> float:
    return SECONDS[kind]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 13))
def test_equal_stages_have_the_textbook_bubble(name: str, stages: int, micro_batches: int) -> None:
    timing = clock([lower(SCHEDULES[name](stages, micro_batches))], unit)
    assert timing.makespan == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert timing.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_spans_of_two_stages_by_hand() -> None:
    timing = clock([lower(one_f_one_b(2, 2))], unit, comm_seconds=0.5)
    spans = [
        [(str(span.action), span.start, span.end) for span in stage] for stage in timing.pipelines[0].stages
    ]
    assert spans == [
        [("F0", 0.0, 1.0), ("F1", 1.0, 2.0), ("B0", 5.0, 7.0), ("B1", 8.0, 10.0)],
        [("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 5.5), ("B1", 5.5, 7.5)],
    ]
    assert timing.pipelines[0].busy == (6.0, 6.0)


def test_the_slowest_pipeline_sets_the_makespan_and_the_others_idle() -> None:
    timing = clock([lower(gpipe(1, 2)), lower(gpipe(1, 6))], unit)
    assert timing.makespan == 18.0
    assert timing.pipelines[0].makespan == 6.0
    assert timing.pipelines[0].bubble_share == 0.0
    assert timing.bubble_share == pytest.approx(12.0 / 36.0)


def test_durations_depend_on_pipeline_and_stage() -> None:
    timing = clock(
        [lower(gpipe(2, 4)), lower(gpipe(2, 4))], lambda p, s, kind: SECONDS[kind] * (1 + s) * (1 + p)
    )
    assert timing.pipelines[1].makespan == 2 * timing.pipelines[0].makespan
    assert timing.pipelines[0].busy == (12.0, 24.0)


def test_a_pipeline_without_work_takes_no_time() -> None:
    timing = clock([lower(gpipe(3, 0))], lambda *_: inf)
    assert timing.makespan == 0.0
    assert timing.bubble_share == 0.0
    assert clock([], unit).makespan == 0.0


def test_chunks_on_one_stage_pass_results_without_communication() -> None:
    tasks = (tuple(map(Action.parse, ("F0", "F0.1", "B0.1", "B0"))),)
    assert clock([lower(tasks, Boundaries.chain(1, 2))], unit, comm_seconds=9.0).makespan == 6.0


def test_seconds_that_are_no_seconds_are_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"duration of F on pipeline 0 stage 0 is -1.0 s; it must be finite and 0 or more"
    ):
        clock([lower(gpipe(1, 1))], lambda *_: -1.0)
    with pytest.raises(ScheduleError, match=r"comm_seconds is nan s; it must be finite"):
        clock([lower(gpipe(1, 1))], unit, comm_seconds=float("nan"))


def test_an_order_that_waits_for_itself_has_no_timing() -> None:
    tasks = (gpipe(1, 1)[0][::-1], gpipe(1, 1)[0])
    with pytest.raises(
        ScheduleError, match="pipeline 0 has no timing: B0 of stage 0 waits for B0 of stage 1, which never"
    ):
        clock([lower(tasks)], unit)
