"""A recipe made ready: everything that can be refused is refused here, before the first process (DESIGN §5)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetero_megatron.data.loader import Loader
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.sources import refuse_two_tokenizers
from hetero_megatron.data_path import DataPath, data_path
from hetero_megatron.errors import HeteroError, LayerError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.metrics import check_installed
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.recipe import ONLY, Recipe
from hetero_megatron.recipe_plan import planned_by
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.switcher import check_shared
from hetero_megatron.runtime.world import World
from hetero_megatron.starting import SettingsAt, Start, agree_on_start, find_start
from hetero_megatron.tracing import check_trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A recipe that was checked and made ready; nothing has been started.

    Attributes:
        programs: by strategy name. Several share the optimizer states of the first, and take turns.
        notices: what a person should know of it: where it starts, what became of the corpus.
    """

    recipe: Recipe
    config: LlamaConfig
    model: Llama
    programs: Mapping[str, Program]
    data: DataPath
    held_out: DataPath | None
    settings: OptimizerSettings
    device: str
    kernels: Kernels
    start: Start
    notices: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.output.folder)

    @property
    def program(self) -> Program:
        """The program that the run begins with; its ranks are those of all programs."""
        return next(iter(self.programs.values()))

    @property
    def evaluates(self) -> str:
        """The name of the strategy under which the loss on held-out documents is measured."""
        return list(self.programs)[self.recipe.evaluates]

    @property
    def identity(self) -> dict[str, object]:
        """What decides which tokens sample k has."""
        return identity_of(self.recipe, self.data)

    def agreed(self, world: World) -> "Run":
        """Collective: this run, or the one that goes on from an earlier checkpoint, if this one's is damaged.

        Raises:
            CheckpointError: ranks see different checkpoints, or a damaged one was asked for; the same on every rank.
        """
        settings_at = settings_of(self.recipe, self.data)
        start = agree_on_start(world, self.start, self.recipe, self.program, settings_at, self.identity)
        return self if start is self.start else replace(self, start=start, settings=start.settings)

    def under(self, program: Program) -> "Run":
        """This run under another strategy: the same samples in the same steps, shared over other pipelines."""
        if program is self.program:
            return self
        return replace(
            self,
            programs={ONLY: program},
            data=self.data.under(self.recipe, program, self.config),
            held_out=self.held_out and self.held_out.under(self.recipe, program, self.config),
        )

    def loader(self, rank: int, position: DataPosition, workers: int | None = None) -> Loader:
        """The steps of a rank from `position` on; by `workers` processes in place of the recipe's."""
        return self.data.loader(tuple(self.programs.values()), rank, position, workers)

    def held_out_batches(self, rank: int, device: torch.device) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every evaluation step: the same samples each time."""
        if self.held_out is None or self.recipe.evaluation is None:
            return []
        found, position = [], DataPosition()
        for _ in range(self.recipe.evaluation.iters):
            step = self.held_out.steps.at(position)
            if step is None:
                break
            found.append(self.held_out.batches(self.programs[self.evaluates], rank, position, device))
            position = self.held_out.steps.after(step)
        return found


def prepare(recipe: Recipe) -> Run:
    """Everything that can be refused is refused here, before the first process.

    Raises:
        HeteroError: whatever does not do, with the recipe's file.
    """
    notices: list[str] = []
    say = notices.append
    with recipe.named():
        config = recipe.make_config()
        model = Llama(config)
        programs = build_programs(recipe, model)
        program, *others = programs.values()
        device = device_type(program)
        kernels = _kernels(recipe, config, device)
        check_installed(recipe.logging.tensorboard, recipe.logging.wandb)
        recipe.make_folder()
        data = data_path(recipe, program, config, say)
        measured = [program, *others][recipe.evaluates]
        held_out = data_path(recipe, measured, config, say, True) if recipe.evaluation else None
        if held_out is not None:
            refuse_two_tokenizers([("data", data.tokenizer), ("evaluation.data", held_out.tokenizer)])
        identity = identity_of(recipe, data)
        if recipe.weights_folder is not None:
            say(f"first weights: those of {recipe.weights_folder}, where there is no checkpoint")
        if recipe.plan is not None:
            say(planned_by(recipe, recipe.plan))
        start = find_start(recipe, program, settings_of(recipe, data), identity, say)
        check_trace(recipe.logging, start.iteration, start.settings.train_iters)
        return Run(
            recipe,
            config,
            model,
            programs,
            data,
            held_out,
            start.settings,
            device,
            kernels,
            start,
            tuple(notices),
        )


def identity_of(recipe: Recipe, data: DataPath) -> dict[str, object]:
    """What decides which tokens sample k of a recipe's run has."""
    return {"seed": recipe.training.seed, **data.identity()}


def settings_of(recipe: Recipe, data: DataPath) -> SettingsAt:
    """The optimizer's settings of a run that goes on from a position; under `train_epochs` its length depends on it.

    Steps that were made before may have been of another size, or on other data.
    """

    def settings_at(position: DataPosition) -> OptimizerSettings:
        iters = recipe.training.train_iters or position.iteration + data.steps.count(position)
        return recipe.training.optimizer_settings(iters)

    return settings_at


def build_program(recipe: Recipe, model: Llama) -> Program:
    """The Program of a recipe's model and strategy on its cluster."""
    return Program.build(trace(model), recipe.make_strategy(), model.config.facts, recipe.make_cluster())


def build_programs(recipe: Recipe, model: Llama) -> dict[str, Program]:
    """The Programs of all strategies of a recipe, by name; they share the optimizer states of the first.

    Raises:
        HeteroError: a strategy does not do, or its states lie elsewhere.
    """
    graph, cluster, programs = trace(model), recipe.make_cluster(), dict[str, Program]()
    for each in recipe.make_strategies():
        states = next((program.annotated.states for program in programs.values()), None)
        try:
            programs[each.name] = Program.build(graph, each.strategy, model.config.facts, cluster, states)
        except HeteroError as error:
            if recipe.strategy.several is None:
                raise
            raise StrategyError(f"strategy {each.name!r}: {error}") from error
    check_shared(programs)
    return programs


def _kernels(recipe: Recipe, config: LlamaConfig, device: str) -> Kernels:
    """The kernels of a run; nothing is imported yet.

    Raises:
        LayerError: one that the recipe asks for cannot run here.
    """
    strategies = [each.strategy for each in recipe.make_strategies()]
    if any(each.has_ring for each in strategies) and recipe.kernels.attention != "auto":
        raise LayerError(
            f"kernels.attention: {recipe.kernels.attention} has no ring form, and pipelines with cp > 1 would pass it "
            "over; leave it auto, or use context_parallel ulysses"
        )
    adam_device = "cpu" if strategies[0].offload_optimizer else device
    dtype, facts = DTYPES[recipe.training.precision], Facts(config.head_size)
    optimizer = recipe.training.optimizer
    return choose_all(recipe.kernels.model_dump(), device, dtype, facts, adam_device, optimizer)


def device_type(program: Program) -> str:
    """`cpu` for a CPU cluster; a cluster of GPUs needs GPUs on this machine.

    Raises:
        StrategyError: the recipe's cluster has GPUs and this machine has none.
    """
    kind = program.cluster.kind(program.strategy.ranks[0]).name
    if kind == "cpu":
        return "cpu"
    # is_available() starts CUDA in this process, after which no forked rank could use it; counting does not.
    if not torch.cuda.device_count():
        raise StrategyError(
            f"cluster: the recipe is for {kind} devices and this machine has no GPU that torch can use; "
            "`explain` and `switch` work without one, and a recipe without `cluster` runs on this machine's CPU"
        )
    return "cuda"
