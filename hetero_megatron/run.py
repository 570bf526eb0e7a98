"""A recipe made ready: everything that can be refused is refused here, before the first process (DESIGN §5)."""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from hetero_megatron.data.blend import Blend, long_document_reports
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.documents import Source, Stream
from hetero_megatron.data.lanes import flop_cost, lanes_of
from hetero_megatron.data.loader import Loader
from hetero_megatron.data.packing import DocumentPacking, Packing, RowPacking, check_last_step
from hetero_megatron.data.packing import prepare as make_batches
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition, Samples
from hetero_megatron.data.sources import refuse_two_tokenizers
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError, LayerError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.metrics import check_installed
from hetero_megatron.models.config import LlamaConfig, flops_per_token
from hetero_megatron.models.llama import Llama
from hetero_megatron.preparing import preparing_bar
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_sections import DataSection
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.world import Say, World
from hetero_megatron.starting import SettingsAt, Start, agree_on_start, find_start
from hetero_megatron.tracing import check_trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DataPath:
    """A corpus as a run takes it: which samples a step has, and how they are shared over pipelines."""

    steps: Steps
    packing: Packing
    section: DataSection
    fingerprint: str
    tokenizer: tuple[str, str] | None

    def loader(
        self, program: Program, rank: int, position: DataPosition, workers: int | None = None
    ) -> Loader:
        """The steps of this rank's pipeline from `position` on, prepared ahead; by `workers` in place of the recipe's."""
        number, _ = program.pipeline_of(rank)
        multiple, section = program.token_multiple(number), self.section
        workers = section.workers if workers is None else workers
        return Loader(self.steps, self.packing, number, multiple, position, workers, section.prefetch)

    def batches(
        self, program: Program, rank: int, position: DataPosition, device: torch.device
    ) -> list[MicroBatch]:
        """This rank's micro-batches of the step at `position`, made here and now; none behind the end."""
        number, _ = program.pipeline_of(rank)
        step = self.steps.at(position)
        if step is None:
            return []
        share = self.packing.share(step)
        made = make_batches(self.packing, share, number, program.token_multiple(number))
        return [batch.on(device) for batch in made]

    def under(self, recipe: Recipe, program: Program, config: LlamaConfig) -> "DataPath":
        """The same steps, shared over the pipelines of another program."""
        return replace(self, packing=_packing(self.steps, self.section, recipe, program, config))

    def identity(self) -> dict[str, object]:
        """What decides which tokens sample k has: two runs with equal ones go through the same samples."""
        section = self.section
        found: dict[str, object] = {
            "corpus": self.fingerprint,
            "packing": section.packing,
            "seq_length": self.steps.seq_length,
        }
        if section.packing == "documents":
            found["long_documents"] = section.long_documents
        samples = self.steps.samples
        if isinstance(samples, Blend):
            found["mixture"] = list(samples.shares)
        if samples.per_pass is None:
            found["shuffle_buffer"] = section.shuffle_buffer
        return found | {"samples_per_pass": samples.per_pass}


@dataclass(frozen=True)
class Run:
    """A recipe that was checked and made ready; nothing has been started.

    `notices` are what a person should know of it: where it starts, what became of the corpus.
    """

    recipe: Recipe
    config: LlamaConfig
    model: Llama
    program: Program
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
            program=program,
            data=self.data.under(self.recipe, program, self.config),
            held_out=self.held_out and self.held_out.under(self.recipe, program, self.config),
        )

    def held_out_batches(self, rank: int, device: torch.device) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every evaluation step: the same samples each time."""
        if self.held_out is None or self.recipe.evaluation is None:
            return []
        found, position = [], DataPosition()
        for _ in range(self.recipe.evaluation.iters):
            step = self.held_out.steps.at(position)
            if step is None:
                break
            found.append(self.held_out.batches(self.program, rank, position, device))
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
        refuse_several(recipe)
        config = recipe.make_config()
        model = Llama(config)
        program = build_program(recipe, model)
        device = device_type(program)
        kernels = _kernels(recipe, config, device)
        check_installed(recipe.logging.tensorboard, recipe.logging.wandb)
        recipe.make_folder()
        data = _data_path(recipe, program, config, say)
        held_out = _data_path(recipe, program, config, say, True) if recipe.evaluation else None
        if held_out is not None:
            refuse_two_tokenizers([("data", data.tokenizer), ("evaluation.data", held_out.tokenizer)])
        identity = identity_of(recipe, data)
        if recipe.weights_folder is not None:
            say(f"first weights: those of {recipe.weights_folder}, where there is no checkpoint")
        start = find_start(recipe, program, settings_of(recipe, data), identity, say)
        check_trace(recipe.logging, start.iteration, start.settings.train_iters)
        return Run(
            recipe,
            config,
            model,
            program,
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


def refuse_several(recipe: Recipe) -> None:
    """Training takes one strategy.

    Raises:
        StrategyError: the recipe has a list of strategies.
    """
    if recipe.strategy.several is not None:
        names = ", ".join(each.name or "" for each in recipe.strategy.several)
        raise StrategyError(
            f"strategy: pretrain does not switch between strategies yet ({names}); `plan --lengths` and `explain` work "
            "with them, and one strategy in their place trains"
        )


def build_program(recipe: Recipe, model: Llama) -> Program:
    """The Program of a recipe's model and strategy on its cluster."""
    return Program.build(trace(model), recipe.make_strategy(), model.config.facts, recipe.make_cluster())


def _data_path(
    recipe: Recipe, program: Program, config: LlamaConfig, say: Say, evaluation: bool = False
) -> DataPath:
    """The samples of a corpus, its steps, and how they are shared over the pipelines.

    Evaluation takes one pass over its data at most.
    """
    training, section, epochs = recipe.training, recipe.data, recipe.training.train_epochs
    if evaluation and recipe.evaluation is not None:
        section, epochs = recipe.evaluation.data, 1.0
    rows, length = training.global_batch_size, training.seq_length
    sources = recipe.open_sources(say, preparing_bar, evaluation)
    fingerprint = " + ".join(map(_fingerprint, sources))
    tokenizer = next((source.tokenizer for source in sources if source.tokenizer), None)
    samples = _samples(sources, section, training.seed, length)
    for report in long_document_reports(samples):
        say(f"evaluation.data: {report}" if evaluation else str(report))
    steps = Steps(samples, rows, length, section.packing, epochs, section.last_batch)
    packing = _packing(steps, section, recipe, program, config)
    if section.packing == "rows" and program.strategy.schedule_tasks and not evaluation:
        check_last_step(steps, _sizes(program))
    return DataPath(steps, packing, section, fingerprint, tokenizer)


def _sizes(program: Program) -> list[tuple[int, int]]:
    return [(p.micro_batches, p.micro_batch_size) for p in program.strategy.pipelines]


def _packing(
    steps: Steps, section: DataSection, recipe: Recipe, program: Program, config: LlamaConfig
) -> Packing:
    """How the samples of a step are shared over the pipelines of a program."""
    samples, length = steps.samples, recipe.training.seq_length
    if section.packing == "rows":
        return RowPacking(samples, recipe.training.global_batch_size, _sizes(program))
    lanes = lanes_of(program, length)
    linear = flops_per_token(config, 0)
    cost = flop_cost(linear, flops_per_token(config, 1) - linear, lanes)
    return DocumentPacking(samples, length, lanes, cost)


def _fingerprint(source: Source) -> str:
    """A source in short: as many documents of other lengths have another one."""
    documents = source.documents
    if isinstance(documents, Stream):
        return source.identity
    lengths = np.ascontiguousarray(documents.lengths)
    return f"{len(lengths)} documents of {lengths.sum()} tokens ({zlib.crc32(lengths.tobytes()):08x})"


def _samples(sources: list[Source], section: DataSection, seed: int, seq_length: int) -> Samples:
    """What training counts; those of several sources in turn, by their shares of the tokens."""

    def of(source: Source) -> Samples:
        documents = source.documents
        if isinstance(documents, Stream):
            if section.packing == "rows":
                raise DataError(
                    "a stream cannot be cut into rows, because its length is not known; use packing: documents, "
                    "or drop stream"
                )
            return StreamSamples(documents, seed, seq_length, section.long_documents, section.shuffle_buffer)
        if section.packing == "rows":
            return PackedRows(documents, seed, seq_length)
        return DocumentSamples(documents, seed, seq_length, section.long_documents)

    found = [of(source) for source in sources]
    return found[0] if len(found) == 1 else Blend(found, [source.weight for source in sources])


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
