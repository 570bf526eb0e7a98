"""What a schedule must pass before the first send (paper §6.3; O-32, O-35, O-36)."""

import random
import re

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, Batch, Step, parse_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.check import check
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.schedule import SCHEDULES, Tasks, gpipe, interleaved, one_f_one_b
from hetero_megatron.pipeline.timing import clock

PLAIN = ("gpipe", "1f1b")  # one chunk per stage, any number of stages


def actions_of(*stages: str) -> PipelineActions:
    return PipelineActions(tuple(map(parse_steps, stages)), Boundaries.chain(len(stages)))


def tasks_of(*stages: str) -> Tasks:
    return tuple(tuple(map(Action.parse, stage.split())) for stage in stages)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("stages", range(1, 7))
def test_schedules_pass_at_every_depth_and_count(name: str, stages: int) -> None:
    check([lower(SCHEDULES[name](stages, micro_batches, 1)) for micro_batches in range(13)])


def test_pipelines_of_unequal_depth_and_count_pass_together() -> None:
    check(
        [lower(one_f_one_b(4, 33)), lower(one_f_one_b(5, 31)), lower(gpipe(2, 1)), lower(one_f_one_b(3, 0))]
    )


@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("stages", range(2, 7))
def test_interleaved_passes_at_every_depth_and_count(stages: int, chunks: int) -> None:
    check([lower(interleaved(stages, micro_batches, chunks)) for micro_batches in range(14)])


def test_an_interleaved_order_passes() -> None:
    check([lower(tasks_of("F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"))])


def test_a_deadlock_names_who_waits_for_whom_and_prints_the_grid() -> None:
    tasks = list(one_f_one_b(3, 4))
    tasks[2] = tasks_of("F1 B1 F0 B0 F2 B2 F3 B3")[0]
    with pytest.raises(ScheduleError) as caught:
        check([lower(one_f_one_b(2, 2)), lower(tuple(tasks))])
    assert str(caught.value) == (
        "pipeline 1: deadlock: stage 0 waits for B0 from stage 1, which waits to send F0 to stage 2, "
        "which waits for F1 from stage 1\n"
        "stage 0 | F0 F1 F2 {SEND_F2 RECV_B0} <-- stuck here\n"
        "stage 1 | .  F0 .  {SEND_F0 RECV_F1} <-- stuck here\n"
        "stage 2 | .  .  .  {RECV_F1} <-- stuck here"
    )


def test_both_neighbours_sending_first_is_a_deadlock() -> None:
    """Harmless with buffered sends, so only a dry run with synchronous sends finds it."""
    stages = (
        "F0 {SEND_F0} F1 {SEND_F1} {RECV_B0} B0 {RECV_B1} B1",
        "{RECV_F0} F0 B0 {SEND_B0} {RECV_F1} F1 B1 {SEND_B1}",
    )
    clock([actions_of(*stages)], lambda *_: 1.0)
    with pytest.raises(
        ScheduleError, match="stage 0 waits to send F1 to stage 1, which waits to send B0 to stage 0\n"
    ):
        check([actions_of(*stages)])
    check(
        [
            actions_of(
                stages[0].replace("{SEND_F1} {RECV_B0}", "{SEND_F1 RECV_B0}"),
                stages[1].replace("} {RECV_F1", " RECV_F1"),
            )
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_two_swapped_forwards_or_backwards_on_one_stage_are_found(seed: int) -> None:
    chooser = random.Random(seed)
    stages, micro_batches = chooser.randint(2, 6), chooser.randint(2, 12)
    tasks = [list(stage) for stage in SCHEDULES[chooser.choice(PLAIN)](stages, micro_batches, 1)]
    stage, kind = chooser.randrange(stages), chooser.choice("FB")
    a, b = chooser.sample([i for i, action in enumerate(tasks[stage]) if action.kind == kind], 2)
    tasks[stage][a], tasks[stage][b] = tasks[stage][b], tasks[stage][a]
    with pytest.raises(ScheduleError, match=r"deadlock|before"):
        check([lower(tuple(map(tuple, tasks)))])


@pytest.mark.parametrize("seed", range(60))
def test_any_shuffle_is_refused_exactly_when_a_message_by_message_run_hangs(seed: int) -> None:
    chooser = random.Random(seed)
    tasks = [
        list(stage)
        for stage in SCHEDULES[chooser.choice(PLAIN)](chooser.randint(1, 5), chooser.randint(1, 6), 1)
    ]
    for _ in range(chooser.randint(1, 4)):
        order = chooser.choice(tasks)
        a = chooser.randrange(len(order) - 1)
        if order[a].micro_batch != order[a + 1].micro_batch:
            order[a], order[a + 1] = order[a + 1], order[a]
    lowered = lower(tuple(map(tuple, tasks)))
    if finishes(lowered, chooser):
        check([lowered])
        assert clock([lowered], lambda *_: 1.0).makespan > 0
    else:
        with pytest.raises(ScheduleError, match="deadlock: stage"):
            check([lowered])


def finishes(actions: PipelineActions, chooser: random.Random) -> bool:
    """An oracle: stages advance in random order, a message leaves both ends once both have posted it."""
    rest = [list(steps) for steps in actions.stages]
    open_items = {
        stage: set(steps[0].items) if steps and isinstance(steps[0], Batch) else set()
        for stage, steps in enumerate(rest)
    }
    while any(rest):
        moves = [stage for stage, steps in enumerate(rest) if steps and not open_items[stage]]
        pairs = [
            (stage, item, peer)
            for stage, items in open_items.items()
            for item in items
            if (peer := actions.boundaries.peer(stage, item)) and peer[1] in open_items[peer[0]]
        ]
        if pairs and (not moves or chooser.random() < 0.5):
            stage, item, peer = chooser.choice(sorted(pairs, key=str))
            open_items[stage].discard(item)
            open_items[peer[0]].discard(peer[1])
        elif moves:
            stage = chooser.choice(moves)
            rest[stage].pop(0)
            following: Step | None = rest[stage][0] if rest[stage] else None
            open_items[stage] = set(following.items) if isinstance(following, Batch) else set()
        else:
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_a_dropped_message_end_is_found(seed: int) -> None:
    chooser = random.Random(seed)
    lowered = lower(SCHEDULES[chooser.choice(PLAIN)](chooser.randint(2, 6), chooser.randint(1, 12), 1))
    stages = [list(steps) for steps in lowered.stages]
    stage = chooser.randrange(len(stages))
    number = chooser.choice([i for i, step in enumerate(stages[stage]) if isinstance(step, Batch)])
    batch = stages[stage][number]
    assert isinstance(batch, Batch)
    dropped = chooser.choice(batch.items)
    left = tuple(item for item in batch.items if item != dropped)
    stages[stage][number : number + 1] = [Batch(left)] if left else []
    with pytest.raises(
        ScheduleError, match=f"stage {stage} runs .* (never posts|without a) {re.escape(str(dropped))}"
    ):
        check([PipelineActions(tuple(map(tuple, stages)), lowered.boundaries)])


def test_a_missing_send_names_the_stage_that_waits() -> None:
    with pytest.raises(
        ScheduleError, match="pipeline 0 stage 0 runs F0 but never posts SEND_F0, for which stage 1 waits"
    ):
        check([actions_of("F0 {RECV_B0} B0", "{RECV_F0} F0 B0 {SEND_B0}")])


def test_a_missing_receive_names_the_stage_it_should_come_from() -> None:
    with pytest.raises(
        ScheduleError, match="pipeline 0 stage 1 runs F0 without a RECV_F0 from stage 0 before it"
    ):
        check([actions_of("F0 {SEND_F0 RECV_B0} B0", "F0 B0 {SEND_B0}")])


def test_a_stage_that_believes_in_fewer_micro_batches_is_named_with_both_counts() -> None:
    tasks = (*one_f_one_b(3, 3)[:2], one_f_one_b(3, 2)[2])
    with pytest.raises(
        ScheduleError, match="pipeline 0: stage 2 runs 2 micro-batches, stage 0 runs 3; all stages of a"
    ):
        check([lower(tasks)])


def test_a_stage_with_other_micro_batches_is_named() -> None:
    with pytest.raises(ScheduleError, match="pipeline 0: stage 1 runs micro-batch 1, stage 0 does not"):
        check([lower(tasks_of("F0 B0", "F1 B1"))])


def test_a_chunk_without_work_is_named() -> None:
    with pytest.raises(ScheduleError, match="stage 0 chunk 1 runs 0 micro-batches, stage 0 runs 1"):
        check([lower(tasks_of("F0 B0", "F0 B0"), Boundaries.chain(2, 2))])


def test_a_boundary_to_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="pipeline 0 stage 2 is named by a boundary, but the pipeline has 2 stages"
    ):
        check([PipelineActions(lower(one_f_one_b(2, 1)).stages, Boundaries.chain(3))])


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("F0 F0 B0", "stage 0 runs F0 twice; once per micro-batch"),
        ("F0 B0 F1", "stage 0 runs 2 forwards and 1 backwards: micro-batch 1 has no B"),
        ("F0 B0 B1", "stage 0 runs 1 forwards and 2 backwards: micro-batch 1 has no F"),
        ("B0 F0", "stage 0 runs B0 before F0"),
        ("F0 {SEND_F0} B0", "stage 0 posts SEND_F0, but there is no stage on the other side"),
    ],
)
def test_faults_on_one_stage_are_named(stage: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check([actions_of(stage)])


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("F0 {SEND_F0} {SEND_F0 RECV_B0} B0", "stage 0 posts SEND_F0 twice; each message"),
        ("{SEND_F0} F0 {RECV_B0} B0", "stage 0 posts SEND_F0 before it runs F0"),
        ("F0 {SEND_F0 RECV_B0} B0 {RECV_B1}", "stage 0 posts RECV_B1, but does not run B1"),
        ("F0 {SEND_F0} B0 {RECV_B0}", "stage 0 runs B0 without a RECV_B0 from stage 1 before it"),
    ],
)
def test_misplaced_messages_are_named(first: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check([actions_of(first, "{RECV_F0} F0 B0 {SEND_B0}")])


def test_a_chunk_that_runs_before_its_input_on_the_same_stage_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"stage 0 runs F0.1 before F0, whose output it needs"):
        check([lower(tasks_of("F0.1 F0 B0.1 B0"))])
    check([lower(tasks_of("F0 F0.1 B0.1 B0"))])


def test_a_pipeline_without_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="pipeline 0 has no stage; at least 1"):
        check([lower(())])


def test_a_late_receive_is_named() -> None:
    with pytest.raises(ScheduleError, match="stage 1 runs F0 without a RECV_F0 from stage 0 before it"):
        check([actions_of("F0 {SEND_F0 RECV_B0} B0", "F0 {RECV_F0} B0 {SEND_B0}")])


def test_one_batch_that_crosses_the_receivers_order_is_refused() -> None:
    """Posted together it cannot hang, but a transport without tags would hand F1 to the receive of F0."""
    first = "F0 F1 {SEND_F1 SEND_F0} {RECV_B0} B0 {RECV_B1} B1"
    second = "{RECV_F0 RECV_F1} F0 F1 B0 {SEND_B0} B1 {SEND_B1}"
    with pytest.raises(
        ScheduleError, match="stage 0 sends F1 to stage 1 where stage 1 receives F0; both ends must use one"
    ):
        check([actions_of(first, second)])
    check([actions_of(first.replace("SEND_F1 SEND_F0", "SEND_F0 SEND_F1"), second)])
