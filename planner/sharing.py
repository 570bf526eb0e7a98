"""A step's documents shared over unlike pipelines, bubbles counted, with a bound on the best sharing (paper A.1, c).

Longest first to the pipeline that would be done soonest, then moves and swaps out of the slowest pipeline; then each
pipeline packs its own documents into as many micro-batches as suit its depth. The bound is that of the relaxed problem,
in which documents can be cut: whatever the multipliers are, no sharing is faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.pipeline_work import Floats, PipelineWork

EXCHANGES, NEAR, BOUND_ROUNDS = 48, 1.001, 40
GAIN = 1e-9
CHEAP = 0.03
# How full micro-batches get when documents are packed: what greedy filling counts on.
FILLED = 0.97


@dataclass(frozen=True, slots=True, eq=False)
class SharingLane:
    """A pipeline as sharing knows it.

    Attributes:
        work: what documents cost there.
        capacity: the most tokens of a micro-batch, filler included.
        multiple: a micro-batch is filled up to a multiple of this.
        longest: no document of more tokens, filled up, comes here.
    """

    work: PipelineWork
    capacity: int
    multiple: int = 1
    longest: int = 1 << 62

    @property
    def room(self) -> int:
        """The most real tokens of a micro-batch."""
        return self.capacity - self.capacity % self.multiple

    @property
    def reach(self) -> int:
        """The longest document that fits after it was filled up."""
        longest = min(self.capacity, self.longest)
        return longest - longest % self.multiple


@dataclass(frozen=True, slots=True)
class Sharing:
    """Per pipeline and micro-batch the numbers of the documents as they were given.

    Attributes:
        seconds: what each pipeline is estimated to take.
        lower_bound: no sharing over these pipelines has a slowest pipeline below this.
    """

    pipelines: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: tuple[float, ...]
    lower_bound: float


def share(lengths: Sequence[int], lanes: Sequence[SharingLane]) -> Sharing:
    """Share documents of these lengths in tokens; the same wherever it runs. A pipeline may be left without any.

    Raises:
        PlannerError: there is no pipeline, or a document fits into none.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    fits = check(sizes, lanes)
    if not len(sizes):
        return Sharing(((),) * len(lanes), (0.0,) * len(lanes), 0.0)
    # Equal pipelines cost the same; ask once.
    known: dict[int, Floats] = {}
    for lane in lanes:
        known.setdefault(id(lane.work), lane.work.alone(sizes))
    alone = np.where(fits, np.stack([known[id(lane.work)] for lane in lanes]), np.inf)
    bound, prices = lower_bound(sizes, lanes, fits)
    order = np.argsort(-alone.min(axis=0), kind="stable").tolist()
    tried = []
    # Anywhere, and only where the bound's prices say that a document is cheap: unlike pipelines each have their best.
    for allowed in (alone, _cheap(alone, prices))[: 2 if len(known) > 1 else 1]:
        owners = _Owners(sizes, lanes, alone)
        for document in order:
            owners.place(document, allowed)
        tried.append((owners.exchange(bound), owners))
    owners = min(tried, key=lambda each: each[0])[1]
    packed = [
        _pack(lane, np.flatnonzero(owners.owner == number), sizes, alone[number])
        for number, lane in enumerate(lanes)
    ]
    return Sharing(tuple(batches for batches, _ in packed), tuple(seconds for _, seconds in packed), bound)


def check(sizes: NDArray[np.int64], lanes: Sequence[SharingLane]) -> NDArray[np.bool_]:
    """Which document fits into which pipeline.

    Raises:
        PlannerError: there is no pipeline, a length is not positive, or a document fits into none.
    """
    if not lanes:
        raise PlannerError(
            "there is no pipeline to share documents over; a strategy has at least one pipeline"
        )
    if len(sizes) and sizes.min() < 1:
        raise PlannerError(
            f"document {int(sizes.argmin())} has {int(sizes.min())} tokens; lengths are positive"
        )
    fits: NDArray[np.bool_] = sizes[None, :] <= np.array([lane.reach for lane in lanes])[:, None]
    if len(sizes) and not fits.any(axis=0).all():
        number = int(np.flatnonzero(~fits.any(axis=0))[0])
        told = ", ".join(
            f"{lane.reach} in pipeline {place}"
            + (f" (filled up to a multiple of {lane.multiple})" if lane.multiple > 1 else "")
            for place, lane in enumerate(lanes)
        )
        raise PlannerError(
            f"document {number} has {int(sizes[number])} tokens and fits into no pipeline; the longest that do have "
            f"{told}; take a strategy for longer documents, or cut them (data.long_documents)"
        )
    return fits


def lower_bound(
    sizes: NDArray[np.int64], lanes: Sequence[SharingLane], fits: NDArray[np.bool_]
) -> tuple[float, Floats]:
    """What the slowest pipeline takes at least, whatever the sharing, and the weights that say so.

    For weights w of the pipelines that sum to 1, sum over documents of min over pipelines of w times its cost there is a
    bound; weights are improved by the loads that they would give.
    """
    known: dict[int, Floats] = {}
    for lane in lanes:
        known.setdefault(id(lane.work), lane.work.least(sizes))
    # A micro-batch holds so many tokens at most: each token pays its part of the constant.
    part = np.array([lane.work.constant / lane.room for lane in lanes])
    least = np.where(fits, np.stack([known[id(lane.work)] for lane in lanes]), np.inf)
    through = (least + np.array([lane.work.constant for lane in lanes])[:, None]) * np.array(
        [lane.work.depth for lane in lanes]
    )[:, None]
    least = least + part[:, None] * sizes
    best = float(through.min(axis=0).max())
    whole = np.where(fits, least, 0.0).sum(axis=1)
    weights = 1 / np.maximum(whole, 1e-30)
    weights /= weights.sum()
    most, chosen = 0.0, weights
    for turn in range(BOUND_ROUNDS):
        priced = weights[:, None] * least
        cheapest = priced.min(axis=0)
        if float(cheapest.sum()) > most:
            most, chosen = float(cheapest.sum()), weights
        # Documents that two pipelines would take at about one price are shared: their loads are smoothed.
        near = np.where(priced <= 1.02 * cheapest, 1.0, 0.0)
        near /= near.sum(axis=0)
        loads = (np.where(near > 0, least, 0.0) * near).sum(axis=1)
        if len(lanes) == 1 or not loads.any():
            break
        weights = weights * np.exp((loads / loads.mean() - 1) / (2 + turn))
        weights /= weights.sum()
    return max(best, most), chosen


def _cheap(alone: Floats, prices: Floats) -> Floats:
    """Costs, infinite where another pipeline takes the document at a clearly lower price."""
    priced = prices[:, None] * alone
    found: Floats = np.where(priced <= (1 + CHEAP) * priced.min(axis=0), alone, np.inf)
    return found


class _Owners:
    """Which pipeline has which document, and what each pipeline then takes."""

    def __init__(self, sizes: NDArray[np.int64], lanes: Sequence[SharingLane], alone: Floats) -> None:
        self.lanes, self.alone, self.sizes = lanes, alone, sizes
        self.owner = np.full(len(sizes), -1)
        self.load = [0.0] * len(lanes)
        self.tokens = [0] * len(lanes)
        self.longest = [0.0] * len(lanes)
        self.count = [0] * len(lanes)
        self._columns: tuple[Floats, list[list[float]]] | None = None
        self._lengths: list[int] = sizes.tolist()

    def place(self, document: int, allowed: Floats) -> None:
        """To the pipeline that would be done soonest, of those where its cost is allowed."""
        if self._columns is None or self._columns[0] is not allowed:
            self._columns = allowed, allowed.T.tolist()
        costs, length = self._columns[1][document], self._lengths[document]
        done, where = np.inf, -1
        for number, cost in enumerate(costs):
            if cost < np.inf:
                load, longest = self.load[number] + cost, max(self.longest[number], cost)
                seconds = self.seconds(
                    number, load, self.tokens[number] + length, longest, self.count[number] + 1
                )
                if seconds < done:
                    done, where = seconds, number
        self.owner[document] = where
        self.load[where] += costs[where]
        self.tokens[where] += length
        self.longest[where] = max(self.longest[where], costs[where])
        self.count[where] += 1

    def seconds(self, number: int, load: float, tokens: float, longest: float, count: int) -> float:
        """What a pipeline takes with so much, packed well."""
        lane = self.lanes[number]
        if count == 0:
            return 0.0
        batches = lane.work.best_count(load, ceil(tokens / (FILLED * lane.room)), count)
        return lane.work.seconds(load, batches, max(longest, load / batches))

    def now(self, number: int) -> float:
        """What a pipeline takes as it is."""
        return self.seconds(
            number, self.load[number], self.tokens[number], self.longest[number], self.count[number]
        )

    def exchange(self, bound: float) -> float:
        """Moves and swaps out of the slowest pipeline while it gets faster; what it then takes."""
        times = [self.now(number) for number in range(len(self.lanes))]
        for _ in range(EXCHANGES):
            slowest = max(range(len(times)), key=times.__getitem__)
            if times[slowest] <= NEAR * bound:
                break
            others = sorted(
                (number for number in range(len(times)) if number != slowest), key=times.__getitem__
            )
            if not any(self._relieve(slowest, other, times) for other in others):
                break
        return max(times)

    def _relieve(self, slow: int, other: int, times: list[float]) -> bool:
        ours, theirs = np.flatnonzero(self.owner == slow), np.flatnonzero(self.owner == other)
        lost = np.concatenate(([0.0], self.alone[slow][theirs]))
        gained = np.concatenate(([0.0], self.alone[other][theirs]))
        down = self.alone[slow][ours][:, None] - lost
        up = self.alone[other][ours][:, None] - gained
        after = np.where(
            np.isfinite(down) & np.isfinite(up), np.maximum(times[slow] - down, times[other] + up), np.inf
        )
        if not after.size:
            return False
        for flat in np.argsort(after, axis=None, kind="stable")[:4].tolist():
            mine, yours = divmod(flat, after.shape[1])
            if after[mine, yours] >= times[slow]:
                return False
            if self._swap(slow, other, int(ours[mine]), int(theirs[yours - 1]) if yours else None, times):
                return True
        return False

    def _swap(self, slow: int, other: int, given: int, taken: int | None, times: list[float]) -> bool:
        before = self.owner.copy()
        self.owner[given] = other
        if taken is not None:
            self.owner[taken] = slow
        saved = [(self.load[n], self.tokens[n], self.longest[n], self.count[n]) for n in (slow, other)]
        for number in (slow, other):
            own = self.owner == number
            costs = self.alone[number][own]
            self.load[number], self.tokens[number] = float(costs.sum()), int(self.sizes[own].sum())
            self.longest[number], self.count[number] = float(costs.max(initial=0.0)), int(own.sum())
        found = self.now(slow), self.now(other)
        if max(found) < times[slow] * (1 - GAIN):
            times[slow], times[other] = found
            return True
        self.owner = before
        for number, old in zip((slow, other), saved, strict=True):
            self.load[number], self.tokens[number], self.longest[number], self.count[number] = old
        return False


Batches = tuple[tuple[int, ...], ...]


def _pack(
    lane: SharingLane, documents: NDArray[np.int64], sizes: NDArray[np.int64], alone: Floats
) -> tuple[Batches, float]:
    """One pipeline's documents in micro-batches, and what the pipeline then takes."""
    if not len(documents):
        return (), 0.0
    costs, tokens = alone[documents], sizes[documents]
    # A lone stage has no bubbles: it only matters that micro-batches are full.
    order = np.argsort(-tokens if lane.work.depth == 1 else -costs, kind="stable").tolist()
    load, cost_list, token_list = float(costs.sum()), costs.tolist(), tokens.tolist()
    least = ceil(int(tokens.sum()) / lane.room)
    wanted = lane.work.best_count(load, least, len(order))
    counts = {least, wanted}
    if lane.work.depth > 1:
        # Equal documents are best in micro-batches of equally many.
        each = len(order) // wanted
        counts = {*range(wanted - 2, wanted + 3), *(ceil(len(order) / n) for n in (max(1, each), each + 1))}
    best: tuple[float, list[list[int]]] | None = None
    for count in sorted({min(max(1, least, count), len(order)) for count in counts}):
        batches = _fill(order, cost_list, token_list, lane.room, count, lane.work.depth == 1)
        largest = max(sum(cost_list[each] for each in batch) for batch in batches)
        seconds = lane.work.seconds(load, len(batches), largest)
        if best is None or seconds < best[0]:
            best = seconds, batches
    assert best is not None, "at least one count was tried"
    numbers = documents.tolist()
    made = sorted(best[1], key=lambda batch: (-sum(cost_list[each] for each in batch), min(batch)))
    return tuple(tuple(sorted(numbers[each] for each in batch)) for batch in made), best[0]


def _fill(
    order: Sequence[int],
    costs: Sequence[float],
    tokens: Sequence[int],
    room: int,
    count: int,
    full: bool,
) -> list[list[int]]:
    """In this order into the lightest of `count` micro-batches that has room, or the fullest; else into a new one."""
    batches: list[list[int]] = [[] for _ in range(count)]
    weights, held = [0.0] * count, [0] * count
    for each in order:
        need, where, best = tokens[each], -1, float("inf")
        for place in range(len(batches)):
            if weights[place] < best and held[place] + need <= room:
                where, best = place, weights[place]
        if where < 0:
            where = len(batches)
            batches.append([])
            weights.append(0.0)
            held.append(0)
        batches[where].append(each)
        held[where] += need
        weights[where] += -need if full else costs[each]
    return [batch for batch in batches if batch]
