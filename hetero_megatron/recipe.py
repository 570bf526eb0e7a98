"""A run as one typed YAML file: everything wrong in it is refused before anything starts (DESIGN 5)."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from hetero_megatron.annotation import AnnotationPlan
from hetero_megatron.cluster import KINDS, Cluster, Device, ranges_text
from hetero_megatron.data.dispatch import deal
from hetero_megatron.data.documents import Source
from hetero_megatron.data.sources import Shown, no_bar, open_sources
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.layout import read_plan
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_weights import HfWeights
from hetero_megatron.pipeline.schedule import Tasks
from hetero_megatron.pipeline.schedule_file import read_csv
from hetero_megatron.planner.chooser import NamedStrategy
from hetero_megatron.recipe_data import check_tokens, corpus_settings, refuse_no_folder
from hetero_megatron.recipe_elastic import ElasticSection, FaultSection
from hetero_megatron.recipe_model import ModelSection, make_config
from hetero_megatron.recipe_plan import plan_recipe
from hetero_megatron.recipe_sections import (
    SCHEDULE_FILE,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    KernelsSection,
    LoggingSection,
    NodesSection,
    OutputSection,
    PipelineSection,
    Section,
    SourceSection,
    StageSection,
    StrategySection,
    SwitchingSection,
    TrainingSection,
    recomputes,
    refuse_unknown,
)
from hetero_megatron.recipe_text import apply_overrides, describe_all, read_yaml
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy

# A section written as bare text means this key of it.
SHORTHANDS = {"model": "preset", "output": "folder", "data": "folder"}
MOST_ERRORS = 5
ONLY = "only"
"""The name of a strategy that is no list's."""


def _expanded(section: str) -> BeforeValidator:
    """Read a section's bare text as its most important key."""
    schema = str | dict[str, Any]
    return BeforeValidator(
        lambda value: {SHORTHANDS[section]: value} if isinstance(value, str) else value,
        json_schema_input_type=schema,
    )


def _known_kinds(value: object) -> object:
    if isinstance(value, Mapping):
        refuse_unknown(value, KINDS)
    return value


def _auto(value: object) -> object:
    """`strategy: auto`, and a list of strategies, as the section that says so."""
    if isinstance(value, list):
        return {"several": value}
    if isinstance(value, str):
        if value != "auto":
            raise RecipeError(f'"{value}" is no strategy; write auto, or a mapping with pipelines')
        return {"auto": True}
    return value


class Recipe(Section):
    """One run: its sections, of which model, strategy and training have no default.

    >>> recipe = load_recipe("recipes/quickstart.yaml", ["training.train_iters=100"])
    """

    model: Annotated[ModelSection, _expanded("model")]  # type: ignore[valid-type]  # fields are LlamaConfig's
    cluster: Annotated[dict[str, NodesSection], BeforeValidator(_known_kinds), Field(min_length=1)] | None = (
        None
    )
    strategy: Annotated[
        StrategySection,
        BeforeValidator(
            _auto, json_schema_input_type=Literal["auto"] | StrategySection | list[StrategySection]
        ),
    ]
    data: Annotated[DataSection, _expanded("data")] = DataSection()
    training: TrainingSection
    kernels: KernelsSection = KernelsSection()
    evaluation: EvaluationSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    output: Annotated[OutputSection, _expanded("output")] = OutputSection()
    elastic: ElasticSection = ElasticSection()
    switching: SwitchingSection = SwitchingSection()
    _file: str = PrivateAttr("recipe")
    _chosen: Strategy | None = PrivateAttr(None)

    @field_validator("evaluation")
    @classmethod
    def _one_tokenizer(
        cls, value: EvaluationSection | None, info: ValidationInfo
    ) -> EvaluationSection | None:
        """Held-out text becomes tokens as the text to train on does, where it does not say how."""
        data = info.data.get("data")
        if value is None or data is None or "tokenizer" in value.data.model_fields_set:
            return value
        return value.model_copy(update={"data": value.data.model_copy(update={"tokenizer": data.tokenizer})})

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of recipe files, for editors."""
        return cls.model_json_schema(mode="validation")

    def make_config(self) -> LlamaConfig:
        """The model: a preset with the fields that the recipe gives in place of its own, or a config.json.

        Raises:
            RecipeError: the preset is unknown, a field is missing, or two places contradict each other.
            ModelError: the fields describe no model.
        """
        return make_config(self.model)

    @property
    def weights_folder(self) -> Path | None:
        """The Hugging Face folder that a fresh run takes its first weights from, if any."""
        weights: str | None = getattr(self.model, "weights")  # noqa: B009  # made from LlamaConfig's fields
        return None if weights is None else Path(weights)

    def make_cluster(self) -> Cluster:
        """The devices: as described, or as many CPU ranks on this machine as the strategy names.

        Raises:
            RecipeError: there is neither a cluster nor a strategy.
        """
        if self.cluster is None and self.strategy.auto:
            raise RecipeError(
                "cluster: missing; with strategy auto the devices come first, such as "
                "cluster: {cpu: {nodes: 1, devices_per_node: 4}}"
            )
        if self.cluster is None:
            named = [each.strategy for each in self.make_strategies()]
            return Cluster.local_cpu(
                max((rank for each in named for rank in (*each.ranks, *each.idle_ranks)), default=0) + 1
            )
        devices: list[Device] = []
        node = 0
        for kind, section in self.cluster.items():
            for _ in range(section.nodes):
                devices += [
                    Device(len(devices) + place, kind, node) for place in range(section.devices_per_node)
                ]
                node += 1
        return Cluster(tuple(devices), tuple(KINDS[kind] for kind in self.cluster))

    def make_strategy(self) -> Strategy:
        """The strategy as the planner, the graph and the runtime know it; under `auto`, planned once; of several, the first.

        Raises:
            RecipeError: the plan file does not do, or there is no cluster to plan for.
            PlannerError: nothing fits.
        """
        return self._strategy(self.strategy.several[0] if self.strategy.several else self.strategy)

    def make_strategies(self) -> tuple[NamedStrategy, ...]:
        """All strategies of a run that switches between several by the documents of each step; the one, named `only`.

        Raises:
            RecipeError: a plan file does not do.
        """
        if self.strategy.several is None:
            return (NamedStrategy(ONLY, self.make_strategy()),)
        return tuple(
            NamedStrategy(section.name or "", self._strategy(section), section.max_length)
            for section in self.strategy.several
        )

    @property
    def evaluates(self) -> int:
        """The number of the strategy that evaluation takes: the first that takes documents of seq_length tokens."""
        if self.strategy.several is None:
            return 0
        length = self.training.seq_length
        longest = [_longest(each, length) for each in self.make_strategies()]
        return next((number for number, held in enumerate(longest) if held >= length), 0)

    def make_prepared(self) -> tuple[Strategy, ...]:
        """The strategies of `elastic.plans`, for other ranks than those that the run begins with.

        Raises:
            RecipeError: a file or its strategy does not do; named by its place in the list.
        """
        found = []
        for number, path in enumerate(self.elastic.plans):
            try:
                # Only the strategy is the file's: model, cluster and training are those of this run.
                strategy = self._strategy(_strategy_section(path))
                strategy.check(self.make_config().facts, self.make_cluster().ranks)
                if self.data.packing == "rows":
                    self._check_rows(strategy, "data")
            except HeteroError as error:
                raise RecipeError(f"elastic.plans[{number}]: {path}: {error}") from error
            found.append(strategy)
        return tuple(found)

    def _strategy(self, section: StrategySection) -> Strategy:
        if section.auto:
            if self._chosen is None:
                self._chosen = plan_recipe(self).strategy
            return self._chosen
        if section.plan is not None:
            return self._planned(section.plan, section)
        pipelines = (
            _with_memory_options(
                _homogeneous(section, self.make_config().num_layers), section, self.make_config().num_layers
            )
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

    def _planned(self, path: str, section: StrategySection) -> Strategy:
        """The strategy behind an annotation plan file."""
        try:
            plan = AnnotationPlan.from_json(Path(path).read_text(encoding="utf-8"))
            counts = [
                (pipeline.micro_batches, pipeline.micro_batch_size, pipeline.cp)
                for pipeline in section.pipelines or ()
            ]
            strategy = read_plan(plan, counts, self.make_config().facts)
        except OSError as error:
            raise RecipeError(f"strategy.plan: {path}: {error.strerror}") from error
        except HeteroError as error:
            raise RecipeError(f"strategy.plan: {path}: {error}") from error
        return dataclasses.replace(
            strategy,
            pipelines=_with_memory_options(strategy.pipelines, section, self.make_config().num_layers),
            schedule=section.schedule,
            idle_ranks=section.idle_ranks,
            context_parallel=section.context_parallel,
            offload_optimizer=section.offload_optimizer,
            schedule_tasks=_schedule_tasks(section.schedule),
        )

    def open_sources(
        self,
        say: Callable[[str], None],
        shown: Shown = no_bar,
        evaluation: bool = False,
        workers: int | None = None,
    ) -> list[Source]:
        """The documents of `data`, or of `evaluation.data`; text becomes tokens first, where it has not yet.

        To be called once, before ranks are forked. What was made is kept in `data.cache`, or in `data` in the run's
        folder, and found there the next time. `say` is told what was done, `shown` how far it is.

        Raises:
            RecipeError: a source or the tokenizer cannot be used.
        """
        section, name = self.data, "data"
        if evaluation:
            assert self.evaluation is not None, "a recipe without evaluation has no evaluation data"
            section, name = self.evaluation.data, "evaluation.data"
        refuse_no_folder(name, section)
        cache = section.cache or self.data.cache
        folder = Path(cache) if cache is not None else Path(self.output.folder) / "data"
        with _in_section(name):
            vocab_size = self.make_config().vocab_size
            return open_sources(corpus_settings(section), vocab_size, folder, say, shown, workers)

    def make_folder(self) -> Path:
        """The run's folder, made if it does not exist and found to be writable.

        Raises:
            RecipeError: it cannot be made or written to.
        """
        folder = Path(self.output.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8"):
                return folder
        except OSError as error:
            raise RecipeError(
                f"output.folder: {folder} is no folder that can be written to: {error.strerror}"
            ) from error

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say in which file a refusal belongs that comes after the recipe was read."""
        try:
            yield
        except HeteroError as error:
            raise RecipeError(f"{self._file}: {error}") from error

    def check(self) -> None:
        """Refuse a recipe whose sections do not fit each other.

        Raises:
            RecipeError: naming the section and what would be right.
        """
        with _in_section("model"):
            config = self.make_config()
        check_tokens("data", self.data, config.vocab_size)
        if self.evaluation is not None:
            check_tokens("evaluation.data", self.evaluation.data, config.vocab_size)
        if config.sliding_window is not None and self.training.seq_length > config.sliding_window:
            raise RecipeError(
                f"training.seq_length: {self.training.seq_length} exceeds the model's sliding_window "
                f"{config.sliding_window}; attention looks back over the whole document, so seq_length must be "
                "at most the window"
            )
        if self.weights_folder is not None:
            with _in_section("model.weights"):
                HfWeights.open(self.weights_folder, config)
        with _in_section("cluster"):
            cluster = self.make_cluster()
        with _in_section("strategy"):
            strategy = self.make_strategy()
            strategy.check(config.facts, cluster.ranks)
            self._check_several(config, cluster)
        self.make_prepared()
        sections = {"data": self.data} | (
            {"evaluation.data": self.evaluation.data} if self.evaluation else {}
        )
        in_rows = [name for name, section in sections.items() if section.packing == "rows"]
        if in_rows:
            # Of several strategies rows are for the one that evaluation takes: to train on, they need documents.
            self._check_rows(self.make_strategies()[self.evaluates].strategy, in_rows[0])

    def _check_several(self, config: LlamaConfig, cluster: Cluster) -> None:
        """Strategies that a run switches between have the same ranks, for optimizer states stay where they are."""
        if self.strategy.several is None:
            if self.switching.profile is not None:
                raise RecipeError(
                    "switching.profile is for choosing among several strategies, and the recipe has one; leave it out, or "
                    "write a list of strategies"
                )
            return
        if self.data.packing != "documents":
            raise RecipeError(
                "several strategies are chosen by the lengths of a step's documents, and data.packing rows has none; use "
                "packing: documents, or one strategy"
            )
        named = self.make_strategies()
        for each in named:
            try:
                each.strategy.check(config.facts, cluster.ranks)
            except HeteroError as error:
                raise RecipeError(f"strategy {each.name!r}: {error}") from error
            if each.strategy.schedule_tasks:
                raise RecipeError(
                    f"strategy {each.name!r}: schedule {each.strategy.schedule} is for one number of micro-batches, and the "
                    "documents of a step decide how many there are; use a schedule by name"
                )
            for what in ("ranks", "zero", "offload_optimizer"):
                first, own = getattr(named[0].strategy, what), getattr(each.strategy, what)
                if first != own:
                    told = [ranges_text(value) if what == "ranks" else value for value in (first, own)]
                    raise RecipeError(
                        f"strategies {named[0].name!r} and {each.name!r} have {what} {told[0]} and {told[1]}; optimizer "
                        f"states stay where they are when the strategy changes, so all need the same {what}"
                    )
        longest = max(_longest(each, self.training.seq_length) for each in named)
        if longest < self.training.seq_length:
            raise RecipeError(
                f"no strategy takes a document of training.seq_length {self.training.seq_length} tokens: they hold up to "
                f"{longest}; raise max_length and max_tokens of one, or lower seq_length"
            )

    def _check_rows(self, strategy: Strategy, section: str) -> None:
        """A step's rows, which `section` makes, must find a place, whole."""
        for number, pipeline in enumerate(strategy.pipelines):
            rows = pipeline.micro_batch_size * self.training.seq_length
            if pipeline.tokens(self.training.seq_length) < rows:
                raise RecipeError(
                    f"strategy.pipelines[{number}].max_tokens: {pipeline.max_tokens} is less than micro_batch_size "
                    f"{pipeline.micro_batch_size} x seq_length {self.training.seq_length} = {rows}, and {section}.packing "
                    "rows makes whole rows; use packing: documents, or leave max_tokens out"
                )
        with _in_section("training.global_batch_size"):
            deal(
                self.training.global_batch_size,
                [(p.micro_batches, p.micro_batch_size) for p in strategy.pipelines],
            )


def _longest(named: NamedStrategy, seq_length: int) -> int:
    """The longest document that a strategy takes."""
    tokens = max(pipeline.tokens(seq_length) for pipeline in named.strategy.pipelines)
    return min(named.max_length or tokens, tokens)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe file; overrides are dotted, such as `training.lr=1e-4`.

    Raises:
        RecipeError: anything that is wrong, with the file, the key's path, and what would be right.
    """
    value = read_yaml(Path(path))
    if not isinstance(value, dict):
        needed = [name for name, field in Recipe.model_fields.items() if field.is_required()]
        others = [name for name in Recipe.model_fields if name not in needed]
        wrong = "is empty" if value is None else "is not a mapping"
        raise RecipeError(
            f"recipe {path} {wrong}; it needs the sections {', '.join(needed)}, "
            f"and may have {', '.join(others)}"
        )
    try:
        recipe = Recipe.model_validate(apply_overrides(value, overrides, SHORTHANDS))
        recipe.check()
        recipe._file = str(path)
    except ValidationError as error:
        sentences = _sentences(error)
        text = "\n".join(f"{path}: {sentence}" for sentence in sentences)
        raise RecipeError(text.replace("strategy.several[", "strategy[")) from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    return recipe


def _sentences(error: ValidationError) -> list[str]:
    return describe_all([dict(one) for one in error.errors()], _homes())[:MOST_ERRORS]


def _strategy_section(path: str) -> StrategySection:
    """The `strategy` section of a file, which may have others."""
    value = read_yaml(Path(path))
    if not isinstance(value, dict) or not isinstance(value.get("strategy"), dict):
        raise RecipeError("the file has no section `strategy` with pipelines; `plan -o FILE` writes one")
    try:
        return StrategySection.model_validate(value["strategy"])
    except ValidationError as error:
        raise RecipeError("; ".join(f"strategy.{sentence}" for sentence in _sentences(error))) from error


@contextmanager
def _in_section(name: str) -> Iterator[None]:
    """Say in which section a refusal of a lower floor belongs."""
    try:
        yield
    except RecipeError:
        raise
    except HeteroError as error:
        raise RecipeError(f"{name}: {error}") from error


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


def _homes() -> dict[str, str]:
    """Which section each key belongs to, for keys that stand in the wrong one."""
    sections: dict[str, type[BaseModel]] = {
        "strategy.pipelines[].stages[]": StageSection,
        "strategy.pipelines[]": PipelineSection,
        "strategy": StrategySection,
        "cluster.<kind>": NodesSection,
        "model": ModelSection,
        "data": DataSection,
        "training": TrainingSection,
        "kernels": KernelsSection,
        "evaluation": EvaluationSection,
        "checkpoint": CheckpointSection,
        "logging": LoggingSection,
        "data.sources[]": SourceSection,
        "output": OutputSection,
        "switching": SwitchingSection,
        "elastic": ElasticSection,
        "elastic.faults[]": FaultSection,
        "the top level": Recipe,
    }
    homes: dict[str, str] = {}
    for name, section in sections.items():
        for key in section.model_fields:
            homes.setdefault(key, name)
    return homes
