"""When every stage computes, and how long it idles: an event simulation of a schedule (paper §6.3, A.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import ComputeKind
from hetero_megatron.pipeline.lower import PipelineActions
from hetero_megatron.pipeline.spans import Span, run_spans

Durations = Callable[[int, int, ComputeKind], float]
"""(pipeline, stage, 'F' or 'B') -> seconds that one such compute action takes."""

ChunkShare = Callable[[int, int, int], float]
"""(pipeline, stage, chunk) -> by what the stage's durations are multiplied in this chunk."""


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


def clock(
    pipelines: Sequence[PipelineActions],
    durations: Durations,
    comm_seconds: float = 0.0,
    chunk_share: ChunkShare | None = None,
) -> Timing:
    """Times of every compute action when sends are asynchronous and each message takes `comm_seconds`.

    A stage starts its next action when the one before is done and the input has arrived; communication
    itself occupies no stage. Every chunk takes the stage's `durations` unless `chunk_share` says otherwise.

    Raises:
        ScheduleError: a duration is negative or not finite, or the actions wait for each other.
    """
    _check_seconds("comm_seconds", comm_seconds)
    return Timing(
        tuple(
            _run(number, actions, durations, comm_seconds, chunk_share)
            for number, actions in enumerate(pipelines)
        )
    )


def _run(
    number: int,
    actions: PipelineActions,
    durations: Durations,
    comm_seconds: float,
    chunk_share: ChunkShare | None,
) -> PipelineTiming:
    seconds = [
        _stage_seconds(number, stage, durations, {task.chunk for task in tasks}, chunk_share)
        for stage, tasks in enumerate(actions.compute)
    ]
    spans, waiting = run_spans(
        actions.compute,
        actions.boundaries,
        lambda stage, task: seconds[stage][task.kind, task.chunk],
        comm_seconds,
    )
    if waiting is not None:
        stage, action, source, missing = waiting
        raise ScheduleError(
            f"pipeline {number} has no timing: {action} of stage {stage} waits for {missing} "
            f"of stage {source}, which never comes; check the schedule first"
        )
    return PipelineTiming(spans)


def _stage_seconds(
    number: int, stage: int, durations: Durations, chunks: set[int], chunk_share: ChunkShare | None
) -> dict[tuple[str, int], float]:
    kinds: tuple[ComputeKind, ...] = ("F", "B")
    found: dict[tuple[str, int], float] = {}
    for kind in kinds if chunks else ():
        whole = durations(number, stage, kind)
        for chunk in chunks:
            part = whole if chunk_share is None else whole * chunk_share(number, stage, chunk)
            here = f"stage {stage}" + (f" chunk {chunk}" if chunk else "")
            _check_seconds(f"duration of {kind} on pipeline {number} {here}", part)
            found[kind, chunk] = part
    return found


def _check_seconds(what: str, seconds: float) -> None:
    if not isfinite(seconds) or seconds < 0:
        raise ScheduleError(f"{what} is {seconds} s; it must be finite and 0 or more")


def _idle_share(busy: float, available: float) -> float:
    return 1.0 - busy / available if available else 0.0
