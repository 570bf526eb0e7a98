"""Pipelines, their schedules, and the proof that a schedule cannot hang (paper §6.3, A.2)."""

from hetero_megatron.pipeline.action import Action, Batch, ComputeKind, Step, parse_steps, spell_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.check import check
from hetero_megatron.pipeline.construct import Pipelines, check_against, construct, position
from hetero_megatron.pipeline.grid import grid
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.plan import Schedule, plan_schedule
from hetero_megatron.pipeline.schedule import SCHEDULES, Tasks, gpipe, one_f_one_b, tasks
from hetero_megatron.pipeline.timing import PipelineTiming, Span, Timing, clock

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
    "lower",
    "one_f_one_b",
    "parse_steps",
    "plan_schedule",
    "position",
    "spell_steps",
    "tasks",
]
