"""What the `strategy` section of a recipe means: pipelines of stages, as the graph and the runtime know them."""

import dataclasses
from itertools import pairwise
from pathlib import Path

from hetero_megatron.annotation import AnnotationPlan
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.layout import read_plan
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.pipeline.schedule import Tasks
from hetero_megatron.pipeline.schedule_file import read_csv
from hetero_megatron.recipe_strategy_sections import (
    SCHEDULE_FILE,
    PipelineSection,
    StageSection,
    StrategySection,
    recomputes,
)
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy


def strategy_of(section: StrategySection, config: LlamaConfig) -> Strategy:
    """The strategy that a section writes out, as pipelines, in their short form or by an annotation plan.

    Raises:
        RecipeError: a file that it names does not do, or degrees or layers do not fit the model.
    """
    if section.plan is not None:
        return _planned(section.plan, section, config)
    pipelines = (
        _with_memory_options(_homogeneous(section, config.num_layers), section, config.num_layers)
        if section.pipelines is None
        else tuple(_pipeline(pipeline) for pipeline in section.pipelines)
    )
    return Strategy(
        pipelines,
        section.zero,
        section.schedule,
        section.sequence_parallel,
        section.idle_ranks,
        section.context_parallel,
        section.offload_optimizer,
        _schedule_tasks(section.schedule),
    )


def _planned(path: str, section: StrategySection, config: LlamaConfig) -> Strategy:
    """The strategy behind an annotation plan file."""
    try:
        plan = AnnotationPlan.from_json(Path(path).read_text(encoding="utf-8"))
        counts = [
            (pipeline.micro_batches, pipeline.micro_batch_size, pipeline.cp)
            for pipeline in section.pipelines or ()
        ]
        strategy = read_plan(plan, counts, config.facts)
    except OSError as error:
        raise RecipeError(f"strategy.plan: {path}: {error.strerror}") from error
    except HeteroError as error:
        raise RecipeError(f"strategy.plan: {path}: {error}") from error
    return dataclasses.replace(
        strategy,
        pipelines=_with_memory_options(strategy.pipelines, section, config.num_layers),
        schedule=section.schedule,
        idle_ranks=section.idle_ranks,
        context_parallel=section.context_parallel,
        offload_optimizer=section.offload_optimizer,
        schedule_tasks=_schedule_tasks(section.schedule),
    )


def _pipeline(section: PipelineSection) -> Pipeline:
    stages = tuple(_stage(stage, section.cp) for stage in section.stages or ())
    return Pipeline(section.micro_batches, section.micro_batch_size, stages, section.max_tokens)


def _stage(section: StageSection, cp: int) -> Stage:
    """A stage; `cp` of its pipeline holds where the stage does not say otherwise."""
    layers = section.layers[0] if section.layers and len(section.layers) == 1 else section.layers or None
    cp = section.cp or cp
    if isinstance(section.tp, tuple):
        parts = len(section.tp) if cp == 1 else cp
        return Stage(section.ranks, layers, section.tp, parts, section.recomputes, section.offload)
    tp = section.tp or max(1, len(section.ranks) // cp)
    return Stage(section.ranks, layers, tp, cp, section.recomputes, section.offload)


def _schedule_tasks(schedule: str) -> tuple[Tasks, ...]:
    """What the schedule's file says, or nothing where it is a name."""
    if not schedule.endswith(SCHEDULE_FILE):
        return ()
    try:
        return read_csv(Path(schedule).read_text(encoding="utf-8"), schedule)
    except OSError as error:
        raise RecipeError(f"strategy.schedule: {schedule}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"strategy.schedule: {schedule} is not UTF-8 text: byte {error.start} is invalid"
        ) from error
    except HeteroError as error:
        raise RecipeError(f"strategy.schedule: {error}") from error


def _homogeneous(section: StrategySection, num_layers: int) -> tuple[Pipeline, ...]:
    """`dp` equal pipelines of `pp` stages; ranks count through a stage, then through a pipeline.

    With `vp`, the layers are cut into pp * vp parts, which stage by stage and round after round go to the stages.
    """
    dp, tp, pp, cp, vp = (size or 1 for size in (section.dp, section.tp, section.pp, section.cp, section.vp))
    parts = pp * vp
    if parts > num_layers:
        told = f"pp: {pp} stages" if vp == 1 else f"vp: {pp} stages of {vp} chunks"
        needs = "stage" if vp == 1 else "chunk"
        raise RecipeError(f"strategy.{told} for {num_layers} layers; each {needs} needs a layer")
    ends = [
        sum(num_layers // parts + (part < num_layers % parts) for part in range(upto))
        for upto in range(parts + 1)
    ]
    ranges = [(first, end - 1) for first, end in pairwise(ends)]
    pipelines: list[Pipeline] = []
    for replica in range(dp):
        stages = [
            Stage(tuple(range(first, first + tp * cp)), own[0] if len(own) == 1 else own, tp, cp)
            for stage in range(pp)
            for first in [(replica * pp + stage) * tp * cp]
            for own in [tuple(ranges[stage::pp])]
        ]
        pipelines.append(Pipeline(section.micro_batches or 0, section.micro_batch_size or 1, tuple(stages)))
    return tuple(pipelines)


def _with_memory_options(
    pipelines: tuple[Pipeline, ...], section: StrategySection, num_layers: int
) -> tuple[Pipeline, ...]:
    """`recompute` and `offload` of the whole strategy, on every stage as far as it holds the layers."""
    entries = recomputes(section.recompute or "none")
    for entry in entries:
        if entry.layers is not None and entry.layers[1] >= num_layers:
            raise RecipeError(
                f"strategy.recompute: {entry.kind} names layer {entry.layers[1]}, "
                f"but the model has layers 0-{num_layers - 1}"
            )

    def on(stage: Stage) -> Stage:
        own = tuple(
            Recompute(entry.kind, (max(first, lo), min(last, hi)))
            for entry in entries
            for lo, hi in [entry.layers or (0, num_layers - 1)]
            for first, last in stage.chunks
            if max(first, lo) <= min(last, hi)
        )
        return dataclasses.replace(stage, recompute=own, offload=bool(section.offload))

    return tuple(dataclasses.replace(p, stages=tuple(map(on, p.stages))) for p in pipelines)
