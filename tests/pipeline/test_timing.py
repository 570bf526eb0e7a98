"""Times and bubbles of schedules (paper §6.3)."""

from math import inf

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.schedule import SCHEDULES, gpipe, interleaved, one_f_one_b
from hetero_megatron.pipeline.timing import PipelineTiming, clock

PLAIN = ("gpipe", "1f1b")  # one chunk per stage, any number of stages

SECONDS = {"F": 1.0, "B": 2.0}


def unit(_pipeline: int, _stage: int, kind: str) -> float:
    return SECONDS[kind]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 13))
def test_equal_stages_have_the_textbook_bubble(name: str, stages: int, micro_batches: int) -> None:
    timing = clock([lower(SCHEDULES[name](stages, micro_batches, 1))], unit)
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


def in_chunks(stages: int, micro_batches: int, chunks: int) -> PipelineTiming:
    """The interleaved schedule when every chunk is an equal share of its stage."""
    actions = lower(interleaved(stages, micro_batches, chunks))
    return clock([actions], unit, chunk_share=lambda *_: 1 / chunks).pipelines[0]


@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("stages", range(2, 7))
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, chunks: int) -> None:
    """Idle time per stage: (stages - 1) micro-batches' under 1F1B, that over `chunks` here, in full groups."""
    for groups in range(1, 5):
        timing = in_chunks(stages, groups * stages, chunks)
        assert timing.makespan == pytest.approx(3.0 * (groups * stages + (stages - 1) / chunks))


@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("stages", range(2, 7))
def test_a_short_last_group_costs_no_more_than_a_full_one(stages: int, chunks: int) -> None:
    for micro_batches in range(1, 14):
        plain = clock([lower(one_f_one_b(stages, micro_batches))], unit).makespan
        padded = -(-micro_batches // stages) * stages
        assert in_chunks(stages, micro_batches, chunks).makespan <= in_chunks(stages, padded, chunks).makespan
        assert in_chunks(stages, micro_batches, chunks).makespan <= plain + 1e-9


@pytest.mark.parametrize("micro_batches", [96, 97, 98, 99])
def test_with_many_micro_batches_the_bubble_is_about_that_of_1f1b_over_the_chunks(micro_batches: int) -> None:
    plain = clock([lower(one_f_one_b(4, micro_batches))], unit).bubble_share
    for chunks in (2, 3, 4):
        ratio = in_chunks(4, micro_batches, chunks).bubble_share / plain
        assert ratio < 1
        if micro_batches % 4 == 0:
            assert ratio == pytest.approx(1 / chunks, rel=0.03)


def test_chunks_may_take_unequal_shares_of_their_stage() -> None:
    actions = lower(interleaved(2, 2, 2))
    timing = clock([actions], unit, chunk_share=lambda _p, stage, chunk: (1, 3)[chunk] if stage else 2)
    assert timing.pipelines[0].busy == (24.0, 24.0)
    lasting = {str(span.action): span.end - span.start for span in timing.pipelines[0].stages[1]}
    assert (lasting["F0"], lasting["F0.1"], lasting["B1.1"]) == (1.0, 3.0, 6.0)
    with pytest.raises(ScheduleError, match="duration of F on pipeline 0 stage 0 chunk 1 is -1.0 s"):
        clock([actions], unit, chunk_share=lambda _p, _s, chunk: -chunk)
