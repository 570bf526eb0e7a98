"""The order of forwards and backwards (paper §6.3; warm-up of 1F1B with few micro-batches)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, spell_steps
from hetero_megatron.pipeline.schedule import SCHEDULES, gpipe, one_f_one_b, tasks


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_runs_once_forward_and_once_backward(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(13):
            for order in tasks(name, stages, micro_batches):
                wanted = {Action(kind, m) for kind in ("F", "B") for m in range(micro_batches)}
                assert len(order) == 2 * micro_batches
                assert set(order) == wanted


def test_a_pipeline_without_work_has_an_empty_schedule() -> None:
    assert tasks("1f1b", 3, 0) == ((), (), ())


def test_an_unknown_schedule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ScheduleError, match="schedule '1f1' is unknown; did you mean '1f1b'"):
        tasks("1f1", 2, 2)
    with pytest.raises(ScheduleError, match="schedule 'zzz' is unknown; known: gpipe, 1f1b"):
        tasks("zzz", 2, 2)


def test_counts_that_are_no_counts_are_refused() -> None:
    with pytest.raises(
        ScheduleError, match="0 stages and 2 micro-batches; at least 1 stage and 0 micro-batches"
    ):
        tasks("gpipe", 0, 2)
    with pytest.raises(ScheduleError, match="2 stages and -1 micro-batches; at least"):
        tasks("gpipe", 2, -1)
