"""The order of forwards and backwards (paper §6.3; warm-up of 1F1B with few micro-batches)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, spell_steps
from hetero_megatron.pipeline.schedule import SCHEDULES, forward_only, gpipe, interleaved, one_f_one_b, tasks

PLAIN = ("gpipe", "1f1b")  # one chunk per stage, any number of stages


def test_gpipe_runs_all_forwards_first() -> None:
    assert [spell_steps(stage) for stage in gpipe(2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_alternates_after_a_warm_up_that_shrinks_by_stage() -> None:
    assert [spell_steps(stage) for stage in one_f_one_b(3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_one_micro_batch_is_f0_b0_on_every_stage() -> None:
    assert [spell_steps(stage) for stage in one_f_one_b(3, 1)] == ["F0 B0"] * 3


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(13))
def test_1f1b_warms_up_by_the_smaller_of_micro_batches_and_stages_behind(
    stages: int, micro_batches: int
) -> None:
    for stage, order in enumerate(one_f_one_b(stages, micro_batches)):
        kinds = "".join(action.kind for action in order)
        if micro_batches:
            leading = len(kinds) - len(kinds.lstrip("F"))
            steady = micro_batches > stages - 1 - stage
            assert leading == min(micro_batches, stages - 1 - stage) + steady
        in_flight = most = 0
        for kind in kinds:
            in_flight += 1 if kind == "F" else -1
            most = max(most, in_flight)
        assert most == min(micro_batches, stages - stage)


@pytest.mark.parametrize("name", PLAIN)
def test_every_micro_batch_runs_once_forward_and_once_backward(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(13):
            for order in SCHEDULES[name](stages, micro_batches, 1):
                wanted = {Action(kind, m) for kind in ("F", "B") for m in range(micro_batches)}
                assert len(order) == 2 * micro_batches
                assert set(order) == wanted


def test_a_pipeline_without_work_has_an_empty_schedule() -> None:
    assert tasks("1f1b", 3, 0) == ((), (), ())


def test_an_unknown_schedule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ScheduleError, match="schedule '1f1' is unknown; did you mean '1f1b'"):
        tasks("1f1", 2, 2)
    with pytest.raises(ScheduleError, match="schedule 'zzz' is unknown; known: gpipe, 1f1b, interleaved"):
        tasks("zzz", 2, 2)


def test_counts_that_are_no_counts_are_refused() -> None:
    with pytest.raises(
        ScheduleError,
        match="0 stages, 2 micro-batches and 1 chunks per stage; at least 1 stage, 0 micro-batches and 1",
    ):
        tasks("gpipe", 0, 2)
    with pytest.raises(ScheduleError, match="2 stages, -1 micro-batches and 1 chunks per stage; at least"):
        tasks("gpipe", 2, -1)


INTERLEAVED = [(stages, chunks) for stages in range(2, 7) for chunks in range(2, 5)]
COUNTS = range(14)


def test_interleaved_passes_group_by_group_chunk_by_chunk() -> None:
    assert [spell_steps(stage) for stage in interleaved(2, 4, 2)] == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_a_short_last_group_keeps_the_order_of_a_full_one() -> None:
    whole, short = interleaved(3, 6, 3), interleaved(3, 5, 3)
    assert short == tuple(tuple(a for a in order if a.micro_batch < 5) for order in whole)
    assert [spell_steps(stage) for stage in interleaved(3, 1, 2)] == ["F0 F0.1 B0.1 B0"] * 3


@pytest.mark.parametrize(("stages", "chunks"), INTERLEAVED)
def test_every_micro_batch_passes_every_chunk_once_each_way(stages: int, chunks: int) -> None:
    for micro_batches in COUNTS:
        for order in interleaved(stages, micro_batches, chunks):
            assert len(order) == 2 * chunks * micro_batches
            assert set(order) == {
                Action(kind, m, c) for kind in ("F", "B") for m in range(micro_batches) for c in range(chunks)
            }


@pytest.mark.parametrize(("stages", "chunks"), INTERLEAVED)
def test_interleaved_keeps_no_more_micro_batches_in_flight_than_megatron(stages: int, chunks: int) -> None:
    """Megatron: min(total, 2 * (stages - 1 - stage) + (chunks - 1) * group) forwards ahead, and one more."""
    for micro_batches in COUNTS:
        for stage, order in enumerate(interleaved(stages, micro_batches, chunks)):
            group = min(stages, micro_batches)
            ahead = min(micro_batches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * group)
            in_flight = most = 0
            for action in order:
                in_flight += 1 if action.kind == "F" else -1
                most = max(most, in_flight)
            assert most <= min(micro_batches * chunks, ahead + 1)
            if micro_batches % stages == 0:
                kinds = "".join(action.kind for action in order)
                steady = ahead < micro_batches * chunks
                assert len(kinds) - len(kinds.lstrip("F")) == ahead + steady


def test_chunks_belong_to_the_interleaved_schedule_and_it_to_them() -> None:
    with pytest.raises(
        ScheduleError, match="schedule 1f1b runs one chunk per stage, not 2; .* use interleaved"
    ):
        tasks("1f1b", 2, 2, 2)
    with pytest.raises(
        ScheduleError, match="schedule gpipe runs one chunk per stage, not 3; .* use interleaved"
    ):
        tasks("gpipe", 2, 2, 3)
    with pytest.raises(ScheduleError, match="interleaved: 2 stages and 1 chunk per stage; .* use 1f1b"):
        tasks("interleaved", 2, 2)
    with pytest.raises(
        ScheduleError, match="interleaved: 1 stage and 2 chunks per stage; .* all its layers in"
    ):
        tasks("interleaved", 1, 2, 2)
    with pytest.raises(ScheduleError, match="2 stages, 2 micro-batches and 0 chunks per stage; at least"):
        tasks("interleaved", 2, 2, 0)


def test_forward_only_has_every_forward_once_and_in_one_order_on_all_stages() -> None:
    for stages, count, chunks in ((1, 3, 1), (3, 4, 1), (2, 3, 2), (3, 7, 3), (4, 0, 2)):
        order = forward_only(stages, count, chunks)
        assert len(order) == stages
        assert len(set(order)) == 1
        assert sorted(map(str, order[0])) == sorted(
            str(Action("F", number, chunk)) for number in range(count) for chunk in range(chunks)
        )
