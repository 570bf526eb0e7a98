"""The checked schedule of one step: all pipelines, ready to be executed (paper §6.3, A.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Step
from hetero_megatron.pipeline.check import check
from hetero_megatron.pipeline.grid import grid
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.schedule import tasks


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every stage of every pipeline does in one step; checked when made, printed as a time grid."""

    name: str
    pipelines: tuple[PipelineActions, ...]

    def __post_init__(self) -> None:
        check(self.pipelines)

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


def plan_schedule(name: str, pipelines: Sequence[tuple[int, int]]) -> Schedule:
    """The schedule `name` for pipelines given as (number of stages, micro-batches of this step).

    >>> plan_schedule("1f1b", [(4, 33), (5, 31)]).steps(1, 4)[1]
    Action(kind='F', micro_batch=0, chunk=0)
    """
    lowered: dict[tuple[int, int], PipelineActions] = {}
    for shape in pipelines:
        if shape not in lowered:
            lowered[shape] = lower(tasks(name, *shape))
    return Schedule(name, tuple(lowered[shape] for shape in pipelines))
