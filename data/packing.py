"""From a step's samples to the micro-batches of every pipeline (paper §8, packing and dispatch)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_megatron.data.batch import PackedTokens, packed
from hetero_megatron.data.dispatch import deal, deal_tail
from hetero_megatron.data.document_dispatch import DispatchReport, dispatch
from hetero_megatron.data.lanes import Cost, Lane
from hetero_megatron.data.piece import Piece
from hetero_megatron.data.samples import Samples
from hetero_megatron.data.steps import Steps, StepSamples
from hetero_megatron.errors import DataError

Unit = tuple[int, int | None]
"""A sample's number, and which of its pieces: None for all of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each pipeline takes of a step: units per micro-batch; how well it is balanced, where a cost says so.

    `strategy`: whose pipelines these are, the number of one of several strategies of a run. `lengths`: of the step's
    documents, where they are shared by length.
    """

    pipelines: tuple[tuple[tuple[Unit, ...], ...], ...]
    report: DispatchReport | None = None
    strategy: int = 0
    lengths: tuple[int, ...] = ()


class Packing(Protocol):
    """How a step's samples are shared; the same on every rank and worker.

    `lookahead`: how many consecutive steps are decided on together; `decide` is told of them first, in order.
    """

    samples: Samples
    lookahead: int

    def decide(self, steps: Sequence[StepSamples]) -> None:
        """Decide on consecutive steps, which follow those of the call before."""
        ...

    def share(self, step: StepSamples) -> Share:
        """Every unit of the step once, by pipeline and micro-batch."""
        ...


class RowPacking:
    """Rows, dealt over the pipelines in order: `pipelines` holds (micro_batches, micro_batch_size) each."""

    lookahead = 1

    def __init__(
        self, samples: Samples, global_batch_size: int, pipelines: Sequence[tuple[int, int]]
    ) -> None:
        """Deal a full step.

        Raises:
            DataError: a full step's rows do not fit, or leave a micro-batch empty.
        """
        self.samples, self._pipelines = samples, tuple(pipelines)
        self._full = deal(global_batch_size, pipelines)
        self._size = global_batch_size

    def decide(self, steps: Sequence[StepSamples]) -> None:
        """Nothing: each step is shared by itself."""

    def share(self, step: StepSamples) -> Share:
        """The step's rows in order; a last step that is not full may leave pipelines without any."""
        dealt = self._full if step.count == self._size else deal_tail(step.count, self._pipelines)
        return Share(
            tuple(
                tuple(tuple((step.first + row, None) for row in rows) for rows in pipeline)
                for pipeline in dealt
            )
        )


def check_last_step(steps: Steps, pipelines: Sequence[tuple[int, int]]) -> None:
    """For a schedule that is for one count of micro-batches: refuse a last step that leaves some without a row.

    Raises:
        DataError: the epochs end with fewer rows than there are micro-batches.
    """
    count = sum(micro_batches for micro_batches, _ in pipelines)
    rest = 0 if steps.total is None or steps.last_batch == "drop" else steps.total % steps.global_batch_size
    if 0 < rest < count:
        raise DataError(
            f"the last step has {rest} rows for {count} micro-batches, and the schedule of a file is for all of them; "
            "use last_batch: drop, train_iters, or a schedule by name"
        )


class DocumentPacking:
    """Documents, dispatched over the pipelines by a cost; a sample of several pieces is dispatched piece by piece."""

    lookahead = 1

    def __init__(self, samples: Samples, seq_length: int, lanes: Sequence[Lane], cost: Cost) -> None:
        """Check that every piece will find a place.

        Raises:
            DataError: no pipeline's micro-batch holds seq_length tokens.
        """
        self.samples, self.seq_length = samples, seq_length
        self.lanes, self.cost = tuple(lanes), cost
        dispatch([seq_length], self.lanes, cost, lambda _: "a document of seq_length tokens")

    def decide(self, steps: Sequence[StepSamples]) -> None:
        """Nothing: each step is shared by itself."""

    def share(self, step: StepSamples) -> Share:
        """The step's documents, balanced over pipelines and micro-batches."""
        units, sizes = pieces_of(self.samples, step, self.seq_length)
        shared = dispatch(sizes, self.lanes, self.cost, lambda unit: f"sample {units[unit][0]}")
        return Share(units_of(shared.pipelines, units), shared.report, lengths=tuple(sizes))


def pieces_of(samples: Samples, step: StepSamples, seq_length: int) -> tuple[list[Unit], list[int]]:
    """The pieces of a step's samples, none longer than seq_length, and their lengths."""
    units: list[Unit] = []
    sizes: list[int] = []
    lengths = samples.lengths(step.first, step.count).tolist()
    for number, length in zip(step.numbers, lengths, strict=True):
        for place, start in enumerate(range(0, length, seq_length)):
            units.append((number, place))
            sizes.append(min(seq_length, length - start))
    return units, sizes


Numbers = tuple[tuple[tuple[int, ...], ...], ...]
"""Per pipeline and micro-batch, numbers of units."""


def units_of(pipelines: Numbers, units: Sequence[Unit]) -> tuple[tuple[tuple[Unit, ...], ...], ...]:
    """The units in the place of their numbers."""
    return tuple(tuple(tuple(units[each] for each in batch) for batch in own) for own in pipelines)


def prepare(packing: Packing, share: Share, pipeline: int, multiple: int) -> list[PackedTokens]:
    """The micro-batches of one pipeline; no other pipeline's samples are read.

    Raises:
        DataError: a document cannot be read.
    """
    found = []
    for units in share.pipelines[pipeline]:
        pieces: list[Piece] = []
        for number, place in units:
            sample = packing.samples.sample(number)
            pieces += sample if place is None else sample[place : place + 1]
        found.append(packed(pieces, multiple))
    return found
