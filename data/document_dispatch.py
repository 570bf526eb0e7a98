"""A step's documents shared over pipelines and their micro-batches by a cost (paper §8, dispatch).

First-fit decreasing: the costliest document first, to the pipeline that would be done soonest with it, into its
least loaded micro-batch that has room; then a few moves and swaps. Nothing reaches beyond the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_megatron.data.filling import Filling
from hetero_megatron.data.lanes import Cost, Lane
from hetero_megatron.errors import DataError

# Moves and swaps between pipelines, and again inside each of them; how near to the least possible is near enough.
EXCHANGES, NEAR = 16, 1.002


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """How well a step is shared.

    Attributes:
        tokens: real tokens of the step, all pipelines.
        padding: filler tokens.
        seconds: cost of each pipeline, the sum over its micro-batches.
        lower_bound: no sharing has a costliest pipeline below this, if costs of documents add up.
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


def dispatch(
    lengths: Sequence[int],
    lanes: Sequence[Lane],
    cost: Cost,
    name: Callable[[int], str] = "document {}".format,
) -> Dispatched:
    """Share documents of these lengths in tokens over the pipelines; the same on every rank.

    A pipeline's costliest micro-batch comes first. A pipeline may be left without any.

    Raises:
        DataError: a document fits into no pipeline's micro-batch; `name` says which one it is.

    >>> lanes = [Lane(1, 8), Lane(1, 8)]
    >>> dispatch([3, 5, 2], lanes, lambda _, lengths: sum(lengths)).pipelines
    (((1,),), ((0, 2),))
    """
    _check(lengths, lanes, name)
    filling = Filling(lengths, lanes, cost)
    least = filling.alone.min(axis=0)
    for document in np.argsort(-least, kind="stable").tolist():
        filling.place(document)
    bound = _lower_bound(filling)
    _balance_pipelines(filling, bound)
    for number in range(len(lanes)):
        _balance_micro_batches(filling, number)
    batches = [
        sorted((batch for batch in own if batch.documents), key=lambda each: (-each.cost, each.documents))
        for own in filling.batches
    ]
    pipelines = tuple(tuple(tuple(sorted(batch.documents)) for batch in own) for own in batches)
    padding = sum(lanes[batch.lane].filled(batch.tokens) - batch.tokens for own in batches for batch in own)
    worst = 1.0
    for own in batches:
        if total := sum(batch.cost for batch in own):
            worst = max(worst, own[0].cost * len(own) / total)
    totals = tuple(sum(batch.cost for batch in own) for own in batches)
    return Dispatched(pipelines, DispatchReport(sum(lengths), padding, totals, bound, worst))


def _check(lengths: Sequence[int], lanes: Sequence[Lane], name: Callable[[int], str]) -> None:
    longest = max(lengths, default=1)
    if any(lane.holds(longest) for lane in lanes):
        return
    told = ", ".join(
        f"{lane.capacity} in pipeline {number} (filled up to a multiple of {lane.multiple})"
        for number, lane in enumerate(lanes)
        if lane.micro_batches and lane.weight
    )
    which = name(list(lengths).index(longest)) if len(lengths) else "a document"
    raise DataError(
        f"{which} has {longest} tokens and fits into no micro-batch; these hold at most {told or 'nothing'} tokens; "
        "give a pipeline a larger micro_batch_size or max_tokens, or make seq_length smaller"
    )


def _lower_bound(filling: Filling) -> float:
    """What the costliest pipeline costs at least: all work shared without a rest, or the costliest document."""
    if not len(filling.lengths):
        return 0.0
    rates = 0.0
    for number, lane in enumerate(filling.lanes):
        if lane.holds(1):
            whole = sum(filling.cost(number, [length]) for length in filling.lengths)
            rates += 1 / whole if whole else 0.0
    return max(1 / rates if rates else 0.0, float(filling.alone.min(axis=0).max()))


def _balance_pipelines(filling: Filling, bound: float) -> None:
    for _ in range(EXCHANGES):
        totals = filling.totals
        heavy = max(range(len(totals)), key=totals.__getitem__)
        if totals[heavy] <= NEAR * bound:
            return
        others = sorted((number for number in range(len(totals)) if number != heavy), key=totals.__getitem__)
        if not any(filling.exchange(filling.batches[heavy], filling.batches[other]) for other in others):
            return


def _balance_micro_batches(filling: Filling, lane: int) -> None:
    batches = filling.batches[lane]
    if len(batches) < 2:
        return
    for _ in range(EXCHANGES):
        heavy = max(batches, key=lambda batch: batch.cost)
        light = min(batches, key=lambda batch: batch.cost)
        near = NEAR * filling.totals[lane] / len(batches)
        if heavy.cost <= near or not filling.exchange([heavy], [light]):
            return
