"""The checked schedule of a step (paper §6.3, A.2)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import spell_steps
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.plan import Schedule, plan_schedule
from hetero_megatron.pipeline.schedule import one_f_one_b


def test_pipelines_run_their_own_micro_batches() -> None:
    schedule = plan_schedule("1f1b", [(4, 33), (5, 31)])
    assert [actions.micro_batches for actions in schedule.pipelines] == [33, 31]
    assert [len(actions.stages) for actions in schedule.pipelines] == [4, 5]


def test_few_micro_batches_print_f0_b0_on_every_stage() -> None:
    schedule = plan_schedule("1f1b", [(2, 1), (3, 1)])
    assert [spell_steps(stage) for actions in schedule.pipelines for stage in actions.compute] == [
        "F0 B0"
    ] * 5


def test_a_schedule_prints_as_a_grid() -> None:
    assert (
        str(plan_schedule("gpipe", [(1, 1)]))
        == "pipeline 0: 1 stage, 1 micro-batch, bubble 0%\nstage 0 | F0 B0 =="
    )


def test_equal_schedules_are_equal_values() -> None:
    assert plan_schedule("1f1b", [(3, 4)]) == plan_schedule("1f1b", [(3, 4)])
    assert len({plan_schedule("1f1b", [(3, 4)]), plan_schedule("1f1b", [(3, 4)])}) == 1


def test_a_schedule_that_would_hang_cannot_be_made() -> None:
    order = one_f_one_b(1, 2)[0]
    with pytest.raises(ScheduleError, match="deadlock"):
        Schedule("broken", (lower((order, order[2:] + order[:2])),))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    schedule = plan_schedule("1f1b", [(2, 1), (3, 1)])
    assert spell_steps(schedule.steps(1, 0)) == "F0 {SEND_F0 RECV_B0} B0"
    with pytest.raises(
        ScheduleError, match=r"schedule 1f1b has no pipeline 0 stage 2; its pipelines have \[2, 3\] stages"
    ):
        schedule.steps(0, 2)
