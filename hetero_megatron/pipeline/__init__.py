"""Pipelines, their schedules, and the proof that a schedule cannot hang (paper §6.3, A.2)."""

from hetero_megatron.pipeline.action import Action, Batch, ComputeKind, Step, parse_steps, spell_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.check import check
from hetero_megatron.pipeline.construct import Pipelines, check_against, construct, position
from hetero_megatron.pipeline.grid import grid
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.plan import Schedule, plan_schedule, plan_tasks
from hetero_megatron.pipeline.schedule import SCHEDULES, Tasks, gpipe, interleaved, one_f_one_b, tasks
from hetero_megatron.pipeline.spans import Span
from hetero_megatron.pipeline.timing import PipelineTiming, Timing, clock

__all__ = [
    "SCHEDULES",
    "Action",
    "Batch",
    "Boundaries",
    "ComputeKind",
    "PipelineActions",
    "PipelineTiming",
    "Pipelines",
    "Schedule",
    "Span",
    "Step",
    "Tasks",
    "Timing",
    "check",
    "check_against",
    "clock",
    "construct",
    "gpipe",
    "grid",
    "interleaved",
    "lower",
    "one_f_one_b",
    "parse_steps",
    "plan_schedule",
    "plan_tasks",
    "position",
    "spell_steps",
    "tasks",
]
