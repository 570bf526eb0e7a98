"""A run as one typed YAML file: everything wrong in it is refused before anything starts (DESIGN 5)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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

from hetero_megatron.cluster import KINDS, Cluster, Device
from hetero_megatron.data.documents import Source
from hetero_megatron.data.sources import Shown, no_bar, open_sources
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_weights import HfWeights
from hetero_megatron.planner.chooser import NamedStrategy
from hetero_megatron.planner.plan import Plan
from hetero_megatron.recipe_check import check_recipe, check_rows, longest_document
from hetero_megatron.recipe_data import corpus_settings, refuse_no_folder
from hetero_megatron.recipe_elastic import ElasticSection, FaultSection
from hetero_megatron.recipe_model import ModelSection, make_config
from hetero_megatron.recipe_plan import plan_recipe
from hetero_megatron.recipe_refusals import describe_all, in_section
from hetero_megatron.recipe_sections import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    KernelsSection,
    LoggingSection,
    NodesSection,
    OutputSection,
    PlanningSection,
    Section,
    SourceSection,
    TrainingSection,
    refuse_unknown,
)
from hetero_megatron.recipe_strategy import strategy_of
from hetero_megatron.recipe_strategy_sections import PipelineSection, StageSection, StrategySection
from hetero_megatron.recipe_text import apply_overrides, read_yaml
from hetero_megatron.strategy import Strategy

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
    planning: PlanningSection = PlanningSection()
    _file: str = PrivateAttr("recipe")
    _chosen: Plan | None = PrivateAttr(None)
    _weights: HfWeights | None = PrivateAttr(None)

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

    def open_weights(self) -> HfWeights | None:
        """The weights in `weights_folder`, checked once: the ranks of this machine are forked afterwards.

        Raises:
            ModelError: they are not those of the model, or not all there.
        """
        if self._weights is None and self.weights_folder is not None:
            self._weights = HfWeights.open(self.weights_folder, self.make_config())
        return self._weights

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

    @property
    def plan(self) -> Plan | None:
        """What the planner made of `strategy: auto`, once it was asked."""
        return self._chosen

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
        longest = [longest_document(each, length) for each in self.make_strategies()]
        return next((number for number, held in enumerate(longest) if held >= length), 0)

    def refuse_unfit(self, strategy: Strategy, ranks: Iterable[int]) -> None:
        """Refuse a strategy for `ranks` that does not fit this run's model or its steps.

        Raises:
            StrategyError: it does not fit the model or the ranks.
            RecipeError: a step's rows find no place.
        """
        strategy.check(self.make_config().facts, ranks)
        if self.data.packing == "rows":
            check_rows(self, strategy, "data")

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
                self.refuse_unfit(strategy, self.make_cluster().ranks)
            except HeteroError as error:
                raise RecipeError(f"elastic.plans[{number}]: {path}: {error}") from error
            found.append(strategy)
        return tuple(found)

    def _strategy(self, section: StrategySection) -> Strategy:
        if section.auto:
            if self._chosen is None:
                self._chosen = plan_recipe(self)
            return self._chosen.strategy
        return strategy_of(section, self.make_config())

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
        with in_section(name):
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
        check_recipe(self)


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
        "planning": PlanningSection,
        "elastic": ElasticSection,
        "elastic.faults[]": FaultSection,
        "the top level": Recipe,
    }
    homes: dict[str, str] = {}
    for name, section in sections.items():
        for key in section.model_fields:
            homes.setdefault(key, name)
    return homes
