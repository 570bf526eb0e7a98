"""The samples of a run as its ranks take them: which ones a step has, and how they are shared over pipelines."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from hetero_megatron.length_strategies import places_of, strategy_packing
from hetero_megatron.models.config import LlamaConfig, flops_per_token
from hetero_megatron.preparing import preparing_bar
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_sections import DataSection
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.world import Say


@dataclass(frozen=True)
class DataPath:
    """A corpus as a run takes it: which samples a step has, and how they are shared over pipelines."""

    steps: Steps
    packing: Packing
    section: DataSection
    fingerprint: str
    tokenizer: tuple[str, str] | None

    def loader(
        self, programs: Sequence[Program], rank: int, position: DataPosition, workers: int | None = None
    ) -> Loader:
        """The steps of this rank's pipelines from `position` on, prepared ahead; by `workers` in place of the recipe's.

        `programs`: those among which the packing chooses, by number.
        """
        number, _ = programs[0].pipeline_of(rank)
        multiple, section = programs[0].token_multiple(number), self.section
        workers = section.workers if workers is None else workers
        places = places_of(programs, rank)
        return Loader(self.steps, self.packing, number, multiple, position, workers, section.prefetch, places)

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


def data_path(
    recipe: Recipe, program: Program, config: LlamaConfig, say: Say, evaluation: bool = False
) -> DataPath:
    """The samples of a corpus, its steps, and how they are shared over the pipelines.

    Where the recipe has several strategies, those to train on are shared over the pipelines of the one that suits a step;
    those of `evaluation`, which takes one pass over its data at most, over those of `program`.

    Raises:
        HeteroError: the corpus or the profile cannot be read, or something of it fits nowhere.
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
    if recipe.strategy.several is not None and not evaluation:
        packing: Packing = strategy_packing(recipe, samples)
    else:
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
