"""A step's documents shared over pipelines and their micro-batches by a cost (paper §8, dispatch).

First-fit decreasing: the costliest document first, to the pipeline that would be done soonest with it, into its
least loaded micro-batch that has room; then a few moves and swaps. Nothing reaches beyond the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_megatron.errors import DataError

Cost = Callable[[int, Sequence[int]], float]
"""Seconds, or any unit of time, that a pipeline takes for a micro-batch with documents of these lengths."""
# Improving moves and swaps per step, over pipelines and again within each of them.
IMPROVEMENTS = 16


@dataclass(frozen=True, slots=True)
class Lane:
    """What dispatch knows of one pipeline.

    Attributes:
        micro_batches: how many to aim at; more are opened where the capacity demands it.
        capacity: the most tokens of a micro-batch, filler included.
        weight: its share of the work, relative to the other pipelines.
        multiple: the tokens of a micro-batch are filled up to a multiple of this.
    """

    micro_batches: int
    capacity: int
    weight: float = 1.0
    multiple: int = 1

    def filled(self, tokens: int) -> int:
        """Tokens of a micro-batch with `tokens` real ones."""
        return tokens + -tokens % self.multiple

    def holds(self, tokens: int) -> bool:
        """Whether a micro-batch of `tokens` real tokens, filled up, is within the capacity."""
        return self.filled(tokens) <= self.capacity


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """How well a step is shared.

    Attributes:
        tokens: real tokens of the step, all pipelines.
        padding: filler tokens.
        seconds: cost of each pipeline, the sum over its micro-batches.
        lower_bound: no sharing of these documents has a costliest pipeline below this.
        micro_batch_imbalance: in the worst pipeline, the costliest micro-batch over the mean one.
    """

    tokens: int
    padding: int
    seconds: tuple[float, ...]
    lower_bound: float
    micro_batch_imbalance: float

    @property
    def padding_share(self) -> float:
        """Filler tokens among all tokens."""
        return self.padding / max(1, self.tokens + self.padding)

    @property
    def imbalance(self) -> float:
        """The costliest pipeline over the mean one: 1 is perfect."""
        total = sum(self.seconds)
        return max(self.seconds) * len(self.seconds) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Per pipeline and micro-batch, the numbers of the documents as they were given, ascending."""

    pipelines: tuple[tuple[tuple[int, ...], ...], ...]
    report: DispatchReport


class _MicroBatch:
    """A micro-batch being filled."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.documents: list[int] = []
        self.lengths: list[int] = []
        self.tokens = 0
        self.cost = 0.0


class _Filling:
    """Micro-batches of all pipelines while documents are being placed."""

    def __init__(self, lengths: Sequence[int], lanes: Sequence[Lane], cost: Cost) -> None:
        self.lengths, self.lanes, self.cost = lengths, lanes, cost
        self.batches = [
            [_MicroBatch(number) for _ in range(lane.micro_batches)] for number, lane in enumerate(lanes)
        ]

    def total(self, lane: int) -> float:
        return sum(batch.cost for batch in self.batches[lane])

    def place(self, document: int) -> None:
        """Into the least loaded micro-batch with room, of the pipeline that would be done soonest."""
        length = self.lengths[document]
        best: tuple[float, int, _MicroBatch, float] | None = None
        for number, lane in enumerate(self.lanes):
            if not lane.holds(length):
                continue
            open_ones = [batch for batch in self.batches[number] if lane.holds(batch.tokens + length)]
            batch = min(open_ones, key=lambda each: each.cost) if open_ones else _MicroBatch(number)
            cost = self.cost(number, [*batch.lengths, length])
            done = self.total(number) - batch.cost + cost
            if best is None or done < best[0]:
                best = (done, number, batch, cost)
        assert best is not None, "documents that fit nowhere are refused before"
        _, number, batch, cost = best
        if not any(batch is each for each in self.batches[number]):
            self.batches[number].append(batch)
        batch.documents.append(document)
        batch.lengths.append(length)
        batch.tokens += length
        batch.cost = cost


def dispatch(
    lengths: Sequence[int],
    lanes: Sequence[Lane],
    cost: Cost,
    names: Callable[[int], str] = "document {}".format,
) -> Dispatched:
    """Share documents of these lengths in tokens over the pipelines; the same on every rank.

    Raises:
        DataError: a document fits into no pipeline's micro-batch; `names` says which one.

    >>> lanes = [Lane(1, 8), Lane(1, 8)]
    >>> dispatch([3, 5, 2], lanes, lambda _, lengths: sum(lengths)).pipelines
    (((1,),), ((0, 2),))
    """
    longest = max(lengths, default=0)
    if not any(lane.holds(longest) for lane in lanes):
        told = ", ".join(
            f"pipeline {number} {lane.capacity} (filled up to a multiple of {lane.multiple})"
            for number, lane in enumerate(lanes)
        )
        raise DataError(
            f"{names(list(lengths).index(longest))} has {longest} tokens and fits into no micro-batch; the most "
            f"tokens of one are: {told}; split or truncate long documents, or give a pipeline a larger "
            "micro_batch_size"
        )
    filling = _Filling(lengths, lanes, cost)
    alone = [
        min(cost(number, [length]) for number, lane in enumerate(lanes) if lane.holds(length))
        for length in lengths
    ]
    for document in sorted(range(len(lengths)), key=lambda each: (-alone[each], each)):
        filling.place(document)
    batches = [
        sorted((batch for batch in own if batch.documents), key=lambda each: (-each.cost, each.documents))
        for own in filling.batches
    ]
    return Dispatched(
        tuple(tuple(tuple(sorted(batch.documents)) for batch in own) for own in batches),
        _report(filling, alone),
    )


def _report(filling: _Filling, alone: Sequence[float]) -> DispatchReport:
    lanes, cost, lengths = filling.lanes, filling.cost, filling.lengths
    used = [[batch for batch in own if batch.documents] for own in filling.batches]
    padding = sum(lanes[batch.lane].filled(batch.tokens) - batch.tokens for own in used for batch in own)
    whole = [sum(cost(number, [length]) for length in lengths) for number in range(len(lanes))]
    shared = 1 / sum(1 / each for each in whole if each) if any(whole) else 0.0
    worst = max(
        (max(b.cost for b in own) * len(own) / (sum(b.cost for b in own) or 1) for own in used if own),
        default=1.0,
    )
    seconds = tuple(filling.total(number) for number in range(len(lanes)))
    return DispatchReport(sum(lengths), padding, seconds, max(shared, *alone, 0.0), worst)


def flop_cost(linear: float, quadratic: float, lanes: Sequence[Lane]) -> Cost:
    """FLOPs of a micro-batch over the pipeline's weight: `linear` per token, `quadratic` per squared document length.

    A Llama has linear = flops_per_token(config, 0) and linear + quadratic = flops_per_token(config, 1).
    """
    weights = [lane.weight for lane in lanes]

    def cost(pipeline: int, lengths: Sequence[int]) -> float:
        return sum(linear * length + quadratic * length * length for length in lengths) / weights[pipeline]

    return cost
