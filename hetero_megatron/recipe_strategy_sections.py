"""The `strategy` section of a recipe: pipelines, stages, and how they are written (paper Tables 6, 9-16)."""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_megatron.errors import RecipeError, ScheduleError
from hetero_megatron.pipeline.schedule import SCHEDULES, check_name
from hetero_megatron.recipe_sections import Count, Ranks, Section
from hetero_megatron.recipe_text import degrees, layer_ranges, recomputed
from hetero_megatron.strategy import Recompute

Layers = Annotated[
    tuple[tuple[int, int], ...] | None,
    Field(strict=False),
    BeforeValidator(layer_ranges, json_schema_input_type=int | str | tuple[int, int] | None),
]
Degrees = Annotated[
    int | tuple[int, ...] | None,
    BeforeValidator(degrees, json_schema_input_type=int | list[int] | None),
]
_Recomputation: TypeAlias = Literal["none", "full", "selective"] | dict[Literal["full", "selective"], Layers]
Recomputation = Annotated[_Recomputation, BeforeValidator(recomputed, json_schema_input_type=_Recomputation)]


def recomputes(value: Recomputation) -> tuple[Recompute, ...]:
    """What a `recompute` key says, as entries of a strategy's stage."""
    if isinstance(value, str):
        return () if value == "none" else (Recompute(value),)
    return tuple(Recompute(kind, layers) for kind, ranges in value.items() for layers in ranges or (None,))


def _known_schedule(value: str) -> str:
    if not value.endswith(SCHEDULE_FILE):
        try:
            check_name(value)
        except ScheduleError as error:
            raise RecipeError(f"{error} (or write the path of a {SCHEDULE_FILE} file)") from error
    return value


SCHEDULE_FILE = ".csv"
Schedule = Annotated[
    str,
    AfterValidator(_known_schedule),
    WithJsonSchema({"anyOf": [{"enum": [*SCHEDULES]}, {"type": "string", "pattern": r"\.csv$"}]}),
]


class StageSection(Section):
    """One stage: its ranks, its layers (none: only embedding or head), how its ranks share the work.

    `tp` may be a list, one degree for each context-parallel part. `recompute` is `full` or `selective` for all
    layers of the stage, or gives layers for each, such as `{full: 0-3, selective: 4-7}`.
    """

    ranks: Annotated[Ranks, Field(min_length=1)]
    layers: Layers = None
    tp: Degrees = None
    cp: Count | None = None
    recompute: Recomputation = "none"
    offload: bool = False

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The entries of a strategy's stage."""
        return recomputes(self.recompute)


class PipelineSection(Section):
    """One pipeline: stages in order (none under a plan), and how many micro-batches of how many rows a step.

    `cp` is the context-parallel size of all its stages. `max_tokens` is the most tokens of a micro-batch where documents
    are packed whole (`data.packing: documents`); left out, those of micro_batch_size rows.
    """

    micro_batches: Annotated[int, Field(ge=0)]
    micro_batch_size: Count = 1
    max_tokens: Count | None = None
    cp: Count = 1
    stages: Annotated[tuple[StageSection, ...], Field(strict=False, min_length=1)] | None = None


class StrategySection(Section):
    """`auto`, or `pipelines`, or dp, tp and pp with the micro_batches and micro_batch_size of each pipeline.

    `auto` leaves everything to the planner (`hetero-megatron plan` shows what it chooses, and why).

    `several` are named strategies that a run switches between, by the documents of each step (a list in the place of the
    section is short for it); each has a `name`, and may have a `max_length`: the longest document, filled up, of the
    steps that it takes.

    `vp` is Megatron's virtual_pipeline_model_parallel_size: how many chunks of layers each stage holds.
    `schedule` is a name, or the path of a CSV file as `explain --schedule-csv` writes it.
    `recompute` and `offload` are then those of all stages; with `pipelines`, each stage has its own.
    With `plan`, an annotation plan as `explain --plan` writes it, the pipelines give only their micro-batches.
    """

    auto: bool = False
    several: Annotated[tuple["StrategySection", ...], Field(strict=False, min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    max_length: Count | None = None
    plan: str | None = None
    pipelines: Annotated[tuple[PipelineSection, ...], Field(strict=False, min_length=1)] | None = None
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    vp: Count | None = None
    micro_batches: Count | None = None
    micro_batch_size: Count | None = None
    recompute: Recomputation | None = None
    offload: bool | None = None
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = True
    context_parallel: Literal["ring", "ulysses"] = "ring"
    offload_optimizer: bool = False
    idle_ranks: Ranks = ()

    @model_validator(mode="after")
    def _one_form(self) -> "StrategySection":
        if self.several is not None:
            self._check_several(self.several)
            return self
        if self.auto:
            others = sorted(self.model_fields_set - {"auto"})
            if others:
                raise RecipeError(
                    f"auto leaves everything to the planner; drop {', '.join(others)}, or drop auto"
                )
            return self
        shorthand = ["dp", "tp", "pp", "cp", "vp", "micro_batches", "micro_batch_size"]
        if self.plan is None:
            shorthand += ["recompute", "offload"]
        used = [name for name in shorthand if getattr(self, name) is not None]
        if self.pipelines is not None and used:
            raise RecipeError(f"{used[0]} describes all pipelines alike; drop it, or drop pipelines")
        if self.pipelines is None and self.micro_batches is None:
            raise RecipeError(
                "write pipelines, or dp, tp and pp together with micro_batches and micro_batch_size"
            )
        for number, pipeline in enumerate(self.pipelines or ()):
            if self.plan is None and pipeline.stages is None:
                raise RecipeError(
                    f"pipelines[{number}].stages is missing; only with `plan` do pipelines go without"
                )
            if self.plan is not None and pipeline.stages is not None:
                raise RecipeError(
                    f"pipelines[{number}].stages and plan both say who does what; drop one of them"
                )
        if self.plan is not None and self.pipelines is None:
            raise RecipeError("plan says who does what; give pipelines with the micro_batches of each, too")
        return self

    def _check_several(self, several: tuple["StrategySection", ...]) -> None:
        others = sorted(self.model_fields_set - {"several"})
        if others:
            raise RecipeError(f"{others[0]} belongs into the strategies of the list; write it there")
        names = [each.name for each in several]
        for number, each in enumerate(several):
            if each.name is None:
                raise RecipeError(
                    f"strategy {number} of the list has no name; give it one, such as name: long"
                )
            if names.count(each.name) > 1:
                raise RecipeError(
                    f"two strategies of the list have the name {each.name!r}; give each its own"
                )
