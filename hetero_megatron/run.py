"""A recipe made ready: everything that can be refused is refused here, before the first process (DESIGN §5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero_megatron.data.blend import blend
from hetero_megatron.data.document_dispatch import Lane
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.documents import Source
from hetero_megatron.data.loader import Loader
from hetero_megatron.data.packing import DocumentPacking, Packing, RowPacking
from hetero_megatron.data.packing import prepare as make_batches
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition, Samples
from hetero_megatron.data.steps import Steps
from hetero_megatron.errors import LayerError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.models.config import LlamaConfig, flops_per_token
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_sections import DataSection
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DataPath:
    """A corpus as a run takes it: which samples a step has, and how they are shared over pipelines."""

    steps: Steps
    packing: Packing
    section: DataSection

    def loader(self, program: Program, rank: int, position: DataPosition) -> Loader:
        """The steps of this rank's pipeline from `position` on, prepared ahead."""
        number, _ = program.pipeline_of(rank)
        multiple, section = program.token_multiple(number), self.section
        return Loader(
            self.steps, self.packing, number, multiple, position, section.workers, section.prefetch
        )

    def batches(
        self, program: Program, rank: int, position: DataPosition, device: torch.device
    ) -> list[MicroBatch]:
        """This rank's micro-batches of the step at `position`, made here and now."""
        number, _ = program.pipeline_of(rank)
        step = self.steps.at(position)
        if step is None:
            return []
        share = self.packing.share(step)
        made = make_batches(self.packing, share, number, program.token_multiple(number))
        return [batch.on(device) for batch in made]


@dataclass(frozen=True)
class Run:
    """A recipe that was checked and made ready; nothing has been started."""

    recipe: Recipe
    config: LlamaConfig
    model: Llama
    program: Program
    data: DataPath
    held_out: DataPath | None
    settings: OptimizerSettings
    device: str
    kernels: Kernels
    start: "Start" = field(default_factory=lambda: Start())

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.output.folder)

    def held_out_batches(self, rank: int, device: torch.device) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every evaluation step: always the same samples."""
        assert self.held_out is not None and self.recipe.evaluation is not None, "the recipe has no evaluation"
        found, position = [], DataPosition()
        for _ in range(self.recipe.evaluation.iters):
            step = self.held_out.steps.at(position)
            if step is None:
                break
            found.append(self.held_out.batches(self.program, rank, position, device))
            position = self.held_out.steps.after(step)
        return found


@dataclass(frozen=True)
class Start:
    """Where a run begins: a checkpoint or nothing, and where its data goes on.

    Attributes:
        notices: what a person should know of it.
    """

    checkpoint: Path | None = None
    position: DataPosition = DataPosition()
    notices: tuple[str, ...] = ()


def prepare(recipe: Recipe) -> Run:
    """Everything that can be refused is refused here, before the first process.

    Raises:
        HeteroError: whatever does not do, with the recipe's file.
    """
    with recipe.named():
        recipe.make_folder()
        check_installed(recipe.logging.tensorboard, recipe.logging.wandb)
        config = recipe.make_config()
        model = Llama(config)
        program = build_program(recipe, model)
        device = device_type(program)
        kernels = _kernels(recipe, config, device)
        start = find_start(recipe, program, say)
        data = _data_path(recipe, recipe.data, "data", program, config, recipe.training.train_epochs)
        held_out = _held_out(recipe, program, config)
        train_iters = recipe.training.train_iters or data.steps.count()
        settings = recipe.training.optimizer_settings(train_iters)
        return start.applied(Run(recipe, config, model, program, data, held_out, settings, device, kernels))


def build_program(recipe: Recipe, model: Llama) -> Program:
    """The Program of a recipe's model and strategy on its cluster."""
    return Program.build(trace(model), recipe.make_strategy(), model.config.facts, recipe.make_cluster())


def _data_path(
    recipe: Recipe, section: DataSection, where: str, program: Program, config: LlamaConfig, epochs: float | None
) -> DataPath:
    """The samples of a corpus, its steps, and how they are shared over the pipelines; `where` is its section."""
    rows, length, seed = recipe.training.global_batch_size, recipe.training.seq_length, recipe.training.seed
    sources = recipe.open_sources(section, where)
    with recipe.in_section(where):
        samples = make_samples(
            sources, section.packing, seed, length, section.long_documents, section.shuffle_buffer
        )
        steps = Steps(samples, rows, length, section.packing, epochs, section.last_batch)
        if section.packing == "rows":
            sizes = [(p.micro_batches, p.micro_batch_size) for p in program.strategy.pipelines]
            return DataPath(steps, RowPacking(samples, rows, sizes), section)
        lanes = lanes_of(program, length)
        linear = flops_per_token(config, 0)
        cost = flop_cost(linear, flops_per_token(config, 1) - linear, lanes)
        return DataPath(steps, DocumentPacking(samples, length, lanes, cost), section)


def _held_out(recipe: Recipe, program: Program, config: LlamaConfig) -> DataPath | None:
    """The data of the evaluation section, taken in one pass at most."""
    if recipe.evaluation is None:
        return None
    return _data_path(recipe, recipe.evaluation.data, "evaluation.data", program, config, 1.0)


def _kernels(recipe: Recipe, config: LlamaConfig, device: str) -> Kernels:
    """The kernels of a run; nothing is imported yet.

    Raises:
        LayerError: one that the recipe asks for cannot run here.
    """
    strategy = recipe.make_strategy()
    if strategy.has_ring and recipe.kernels.attention != "auto":
        raise LayerError(
            f"kernels.attention: {recipe.kernels.attention} has no ring form, and pipelines with cp > 1 would pass it "
            "over; leave it auto, or use context_parallel ulysses"
        )
    adam_device = "cpu" if strategy.offload_optimizer else device
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
