"""The checked schedule of one step: all pipelines, ready to be executed (paper §6.3, A.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Step
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.check import check
from hetero_megatron.pipeline.dry_run import dry_run
from hetero_megatron.pipeline.grid import grid
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.schedule import Tasks, forward_only, tasks


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every stage of every pipeline does in one step; checked when made, printed as a time grid.

    Without `backward` it is what evaluation does: forwards only.
    """

    name: str
    pipelines: tuple[PipelineActions, ...]
    backward: bool = True

    def __post_init__(self) -> None:
        check(self.pipelines, self.backward)

    def steps(self, pipeline: int, stage: int) -> tuple[Step, ...]:
        """The actions of one stage, which all its ranks follow."""
        if not (0 <= pipeline < len(self.pipelines) and 0 <= stage < len(self.pipelines[pipeline].stages)):
            depths = [len(actions.stages) for actions in self.pipelines]
            raise ScheduleError(
                f"schedule {self.name} has no pipeline {pipeline} stage {stage}; "
                f"its pipelines have {depths} stages"
            )
        return self.pipelines[pipeline].stages[stage]

    def __str__(self) -> str:
        return grid(self.pipelines)


def plan_schedule(name: str, pipelines: Sequence[tuple[int, int, int]]) -> Schedule:
    """The schedule `name` for pipelines given as (stages, micro-batches of this step, chunks per stage).

    A pipeline of one stage and one chunk, which has nothing to interleave, stands beside interleaved ones as 1F1B.

    Raises:
        ScheduleError: the schedule is unknown, or not for so many stages or chunks.

    >>> plan_schedule("1f1b", [(4, 33, 1), (5, 31, 1)]).steps(1, 4)[1]
    Action(kind='F', micro_batch=0, chunk=0)
    """
    lowered: dict[tuple[int, int, int], PipelineActions] = {}
    for shape in pipelines:
        if shape not in lowered:
            stages, micro_batches, chunks = shape
            own = "1f1b" if name == "interleaved" and (stages, chunks) == (1, 1) else name
            lowered[shape] = lower(
                tasks(own, stages, micro_batches, chunks), Boundaries.chain(stages, chunks)
            )
    return Schedule(name, tuple(lowered[shape] for shape in pipelines))


def plan_forward(pipelines: Sequence[tuple[int, int, int]]) -> Schedule:
    """The forwards alone of pipelines given as (stages, micro-batches, chunks per stage), for evaluation."""
    lowered = [
        lower(forward_only(stages, micro_batches, chunks), Boundaries.chain(stages, chunks))
        for stages, micro_batches, chunks in pipelines
    ]
    return Schedule("forward-only", tuple(lowered), backward=False)


def plan_tasks(name: str, pipelines: Sequence[tuple[Tasks, int]]) -> Schedule:
    """A schedule whose compute actions are given, as (tasks, chunks per stage) of each pipeline.

    Inputs are received right before they are used, or where that could hang, as soon as they are sent.

    Raises:
        ScheduleError: the tasks are incomplete, contradict each other, or wait for each other.
    """
    lowered: list[PipelineActions] = []
    for order, chunks in pipelines:
        boundaries = Boundaries.chain(len(order), chunks)
        actions = lower(order, boundaries)
        if dry_run(actions).stuck:
            actions = lower(order, boundaries, early=True)
        lowered.append(actions)
    return Schedule(name, tuple(lowered))
