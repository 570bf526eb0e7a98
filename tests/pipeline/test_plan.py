"""The checked schedule of a step (paper §6.3, A.2)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, spell_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.dry_run import dry_run
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.plan import Schedule, plan_forward, plan_schedule, plan_tasks
from hetero_megatron.pipeline.schedule import Tasks, one_f_one_b, tasks


def test_pipelines_run_their_own_micro_batches() -> None:
    schedule = plan_schedule("1f1b", [(4, 33, 1), (5, 31, 1)])
    assert [actions.micro_batches for actions in schedule.pipelines] == [33, 31]
    assert [len(actions.stages) for actions in schedule.pipelines] == [4, 5]


def test_few_micro_batches_print_f0_b0_on_every_stage() -> None:
    schedule = plan_schedule("1f1b", [(2, 1, 1), (3, 1, 1)])
    assert [spell_steps(stage) for actions in schedule.pipelines for stage in actions.compute] == [
        "F0 B0"
    ] * 5


def test_a_schedule_prints_as_a_grid() -> None:
    assert (
        str(plan_schedule("gpipe", [(1, 1, 1)]))
        == "pipeline 0: 1 stage, 1 micro-batch, bubble 0%\nstage 0 | F0 B0 =="
    )


def test_equal_schedules_are_equal_values() -> None:
    assert plan_schedule("1f1b", [(3, 4, 1)]) == plan_schedule("1f1b", [(3, 4, 1)])
    assert len({plan_schedule("1f1b", [(3, 4, 1)]), plan_schedule("1f1b", [(3, 4, 1)])}) == 1


def test_a_schedule_that_would_hang_cannot_be_made() -> None:
    order = one_f_one_b(1, 2)[0]
    with pytest.raises(ScheduleError, match="deadlock"):
        Schedule("broken", (lower((order, order[2:] + order[:2])),))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    schedule = plan_schedule("1f1b", [(2, 1, 1), (3, 1, 1)])
    assert spell_steps(schedule.steps(1, 0)) == "F0 {SEND_F0 RECV_B0} B0"
    with pytest.raises(
        ScheduleError, match=r"schedule 1f1b has no pipeline 0 stage 2; its pipelines have \[2, 3\] stages"
    ):
        schedule.steps(0, 2)


def test_a_pipeline_of_one_stage_stands_beside_interleaved_ones() -> None:
    schedule = plan_schedule("interleaved", [(2, 4, 2), (1, 2, 1), (3, 0, 2)])
    assert spell_steps(schedule.steps(1, 0)) == "F0 B0 F1 B1"
    assert schedule.steps(2, 1) == ()
    assert [actions.boundaries for actions in schedule.pipelines] == [
        Boundaries.chain(2, 2),
        Boundaries.chain(1),
        Boundaries.chain(3, 2),
    ]


def test_other_shapes_are_refused_by_the_schedule() -> None:
    with pytest.raises(ScheduleError, match="interleaved: 2 stages and 1 chunk per stage"):
        plan_schedule("interleaved", [(2, 4, 1)])
    with pytest.raises(ScheduleError, match="schedule 1f1b runs one chunk per stage, not 2"):
        plan_schedule("1f1b", [(2, 4, 2)])


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_given_tasks_are_the_schedule_that_they_were_taken_from(name: str, chunks: int) -> None:
    order = tasks(name, 3, 5, chunks)
    assert plan_tasks(name, [(order, chunks)]) == plan_schedule(name, [(3, 5, chunks)])


def parsed(*stages: str) -> Tasks:
    return tuple(tuple(map(Action.parse, stage.split())) for stage in stages)


def test_given_tasks_that_need_early_receives_get_them() -> None:
    """Stage 1 takes F1 first: received just in time, F0 would keep stage 0 waiting before it makes F1."""
    order = parsed("F0 F1 B0 B1", "F1 F0 B0 B1")
    assert dry_run(lower(order)).stuck == (0, 1)
    (actions,) = plan_tasks("mine.csv", [(order, 1)]).pipelines
    assert actions == lower(order, early=True)


def test_given_tasks_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits for F0.1 from stage 1"):
        plan_tasks("mine.csv", [(parsed("F0 F0.1 B0.1 B0", "F0.1 F0 B0.1 B0"), 2)])


@pytest.mark.parametrize("chunks", range(1, 4))
def test_forward_only_passes_the_check_at_every_depth_and_count(chunks: int) -> None:
    for stages in range(1, 6):
        schedule = plan_forward([(stages, count, chunks) for count in range(9)])
        assert [actions.micro_batches for actions in schedule.pipelines] == list(range(9))


def test_forward_only_sends_activations_only() -> None:
    assert [spell_steps(steps) for steps in plan_forward([(2, 2, 1)]).pipelines[0].stages] == [
        "F0 {SEND_F0} F1 {SEND_F1}",
        "{RECV_F0} F0 {RECV_F1} F1",
    ]


def test_a_backward_in_a_forward_only_schedule_is_refused() -> None:
    actions = lower(one_f_one_b(2, 1))
    with pytest.raises(
        ScheduleError, match="pipeline 0 stage 0 runs B0; a forward-only schedule has no backward"
    ):
        Schedule("forward-only", (actions,), backward=False)
