"""When every stage computes, and how long it idles: an event simulation of a schedule (paper §6.3, A.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, ComputeKind
from hetero_megatron.pipeline.lower import PipelineActions

Durations = Callable[[int, int, ComputeKind], float]
"""(pipeline, stage, 'F' or 'B') -> seconds that one such compute action takes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action with its start and end, in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineTiming:
    """The spans of every stage of one pipeline, in order."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the pipeline's last action ends."""
        return max((spans[-1].end for spans in self.stages if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each stage computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.stages)

    @property
    def bubble_share(self) -> float:
        """Idle share of the pipeline's stage-time, 0 to 1, within its own makespan."""
        return _idle_share(sum(self.busy), len(self.stages) * self.makespan)


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of all pipelines of a step; pipelines run side by side."""

    pipelines: tuple[PipelineTiming, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the slowest pipeline is done."""
        return max((pipeline.makespan for pipeline in self.pipelines), default=0.0)

    @property
    def bubble_share(self) -> float:
        """Idle share of all stages, 0 to 1, within the makespan; every stage weighs the same."""
        stages = sum(len(pipeline.stages) for pipeline in self.pipelines)
        return _idle_share(sum(sum(pipeline.busy) for pipeline in self.pipelines), stages * self.makespan)


def clock(pipelines: Sequence[PipelineActions], durations: Durations, comm_seconds: float = 0.0) -> Timing:
    """Times of every compute action when sends are asynchronous and each message takes `comm_seconds`.

    A stage starts its next action when the one before is done and the input has arrived; communication
    itself occupies no stage.

    Raises:
        ScheduleError: a duration is negative or not finite, or the actions wait for each other.
    """
    _check_seconds("comm_seconds", comm_seconds)
    return Timing(
        tuple(_run(number, actions, durations, comm_seconds) for number, actions in enumerate(pipelines))
    )


def _run(number: int, actions: PipelineActions, durations: Durations, comm_seconds: float) -> PipelineTiming:
    compute, boundaries = actions.compute, actions.boundaries
    seconds = [
        _stage_seconds(number, stage, durations) if tasks else {} for stage, tasks in enumerate(compute)
    ]
    ended: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in compute]

    def needs(stage: int, action: Action) -> list[tuple[int, Action]]:
        place = boundaries.input_of(stage, action)
        before = [] if place is None else [(place[0], Action(action.kind, action.micro_batch, place[1]))]
        own = [(stage, Action("F", action.micro_batch, action.chunk))] if action.kind == "B" else []
        return before + own

    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(compute):
            while len(spans[stage]) < len(tasks):
                action = tasks[len(spans[stage])]
                inputs = needs(stage, action)
                if any(need not in ended for need in inputs):
                    break
                free = spans[stage][-1].end if spans[stage] else 0.0
                start = max([free] + [ended[need] + comm_seconds * (need[0] != stage) for need in inputs])
                span = Span(action, start, start + seconds[stage][action.kind])
                spans[stage].append(span)
                ended[stage, action] = span.end
                moved = True
    for stage, tasks in enumerate(compute):
        if len(spans[stage]) < len(tasks):
            action = tasks[len(spans[stage])]
            source, missing = next(need for need in needs(stage, action) if need not in ended)
            raise ScheduleError(
                f"pipeline {number} has no timing: {action} of stage {stage} waits for {missing} "
                f"of stage {source}, which never comes; check the schedule first"
            )
    return PipelineTiming(tuple(map(tuple, spans)))


def _stage_seconds(number: int, stage: int, durations: Durations) -> dict[str, float]:
    kinds: tuple[ComputeKind, ...] = ("F", "B")
    found: dict[str, float] = {kind: durations(number, stage, kind) for kind in kinds}
    for kind, value in found.items():
        _check_seconds(f"duration of {kind} on pipeline {number} stage {stage}", value)
    return found


def _check_seconds(what: str, seconds: float) -> None:
    if not isfinite(seconds) or seconds < 0:
        raise ScheduleError(f"{what} is {seconds} s; it must be finite and 0 or more")


def _idle_share(busy: float, available: float) -> float:
    return 1.0 - busy / available if available else 0.0
