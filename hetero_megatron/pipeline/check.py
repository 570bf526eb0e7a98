"""What must hold before the first send: complete, in order, the same counts, no deadlock (paper §6.3)."""

from collections import defaultdict
from collections.abc import Sequence

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, Batch, receive_for, send_of
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.dry_run import dry_run
from hetero_megatron.pipeline.lower import PipelineActions


def check(pipelines: Sequence[PipelineActions], backward: bool = True) -> None:
    """Refuse actions that are incomplete, contradict each other between stages, or can hang.

    Pipelines may run different numbers of micro-batches; the stages of one pipeline may not. The last part
    is a dry run in which every send waits for its receiver, so a schedule that passes cannot hang on any
    transport. Without `backward` every micro-batch has an F and no B, as in evaluation.

    Raises:
        ScheduleError: naming pipeline, stage, action and counts; a deadlock is followed by the printed grid.
    """
    seen: set[PipelineActions] = set()
    for number, actions in enumerate(pipelines):
        if actions not in seen:
            seen.add(actions)
            check_compute(f"pipeline {number}", actions, backward)
            check_messages(f"pipeline {number}", actions)
            if (run := dry_run(actions)).stuck:
                raise ScheduleError(f"pipeline {number}: {run.explain()}")
            check_order(f"pipeline {number}", actions)


def check_compute(name: str, actions: PipelineActions, backward: bool = True) -> None:
    """Every micro-batch has one F and then one B (or none) in every place; all places run the same micro-batches."""
    if not actions.stages:
        raise ScheduleError(f"{name} has no stage; at least 1 is needed")
    places = {(stage, 0) for stage in range(len(actions.stages))}
    places |= {place for pair in actions.boundaries.pairs for place in pair}
    places |= {(stage, action.chunk) for stage, tasks in enumerate(actions.compute) for action in tasks}
    ran: dict[tuple[int, int], set[int]] = {}
    for stage, chunk in sorted(places):
        here = f"{name} stage {stage}" + (f" chunk {chunk}" if chunk else "")
        if stage >= len(actions.stages):
            raise ScheduleError(
                f"{here} is named by a boundary, but the pipeline has {len(actions.stages)} stages"
            )
        ran[stage, chunk] = _check_place(
            here, [action for action in actions.compute[stage] if action.chunk == chunk], backward
        )
    first = ran[0, 0]
    for (stage, chunk), found in ran.items():
        here = f"stage {stage}" + (f" chunk {chunk}" if chunk else "")
        if len(found) != len(first):
            raise ScheduleError(
                f"{name}: {here} runs {len(found)} micro-batches, stage 0 runs {len(first)}; "
                "all stages of a pipeline must run the same micro-batches"
            )
        if found != first:
            raise ScheduleError(
                f"{name}: {here} runs micro-batch {min(found - first)}, stage 0 does not; "
                "all stages of a pipeline must run the same micro-batches"
            )


def _check_place(here: str, tasks: Sequence[Action], with_backward: bool) -> set[int]:
    forward: set[int] = set()
    backward: set[int] = set()
    for action in tasks:
        if action.kind == "B" and not with_backward:
            raise ScheduleError(f"{here} runs {action}; a forward-only schedule has no backward")
        done = forward if action.kind == "F" else backward
        if action.micro_batch in done:
            raise ScheduleError(f"{here} runs {action} twice; once per micro-batch is right")
        done.add(action.micro_batch)
        if (
            action.kind == "B"
            and action.micro_batch not in forward
            and Action("F", action.micro_batch, action.chunk) in tasks
        ):
            raise ScheduleError(
                f"{here} runs {action} before {Action('F', action.micro_batch, action.chunk)}"
            )
    if with_backward and forward != backward:
        missing = min(forward ^ backward)
        raise ScheduleError(
            f"{here} runs {len(forward)} forwards and {len(backward)} backwards: "
            f"micro-batch {missing} has no {'B' if missing in forward else 'F'}"
        )
    return forward


def check_messages(name: str, actions: PipelineActions) -> None:
    """Every input is there before it is used, every output is sent after it is made, each once."""
    for stage, steps in enumerate(actions.stages):
        here = f"{name} stage {stage}"
        done: set[Action] = set()
        tasks = frozenset(actions.compute[stage])
        for step in steps:
            if isinstance(step, Action):
                _check_input(here, stage, step, actions.boundaries, done)
                done.add(step)
                continue
            for item in step.items:
                if actions.boundaries.peer(stage, item) is None:
                    raise ScheduleError(f"{here} posts {item}, but there is no stage on the other side")
                if item in done:
                    raise ScheduleError(f"{here} posts {item} twice; each message is sent and received once")
                _check_task(here, item, tasks, done)
                done.add(item)
        for task in actions.compute[stage]:
            target = actions.boundaries.sends_to(stage, task)
            if target is not None and (sent := send_of(task)) not in done:
                raise ScheduleError(
                    f"{here} runs {task} but never posts {sent}, for which stage {target[0]} waits"
                )


def _check_input(here: str, stage: int, task: Action, boundaries: Boundaries, done: set[Action]) -> None:
    """The input of a compute action was received, or computed on the same stage."""
    place = boundaries.input_of(stage, task)
    if place is None:
        return
    if place[0] != stage and (received := receive_for(task)) not in done:
        raise ScheduleError(f"{here} runs {task} without a {received} from stage {place[0]} before it")
    if place[0] == stage and (made := Action(task.kind, task.micro_batch, place[1])) not in done:
        raise ScheduleError(f"{here} runs {task} before {made}, whose output it needs")


def _check_task(here: str, item: Action, tasks: frozenset[Action], done: set[Action]) -> None:
    """Every message belongs to a compute action, and a send stands after it."""
    task = Action("F" if item.kind.endswith("F") else "B", item.micro_batch, item.chunk)
    if task not in tasks:
        raise ScheduleError(f"{here} posts {item}, but does not run {task}")
    if item.is_send and task not in done:
        raise ScheduleError(f"{here} posts {item} before it runs {task}")


def check_order(name: str, actions: PipelineActions) -> None:
    """Between two stages, messages are sent and received in one order, as transports without tags need."""
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for stage, steps in enumerate(actions.stages):
        for item in (item for step in steps if isinstance(step, Batch) for item in step.items):
            peer = actions.boundaries.peer(stage, item)
            assert peer is not None, f"{item} of stage {stage} has a peer: check_messages saw it"
            if item.is_send:
                sent[stage, peer[0]].append(item)
            else:
                received[peer[0], stage].append(peer[1])
    for (source, target), items in sent.items():
        for wanted, found in zip(items, received[source, target], strict=True):
            if wanted != found:
                raise ScheduleError(
                    f"{name}: stage {source} sends {wanted.payload} to stage {target} where stage {target} "
                    f"receives {found.payload}; both ends must use one order"
                )
