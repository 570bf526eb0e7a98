"""Micro-batches of all pipelines while documents are put in and exchanged (paper §8, packing)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero_megatron.data.lanes import Cost, Lane

# Exact evaluations per exchange, and how many documents of either side are looked at.
TRIED, LOOKED_AT = 16, 256
# A gain below this share of the load is rounding.
GAIN = 1e-6


@dataclass(slots=True, eq=False)
class MicroBatchFilling:
    """A micro-batch being filled, number `place` of pipeline `lane`: its documents, and what it costs."""

    lane: int
    place: int
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0


class Filling:
    """Documents in micro-batches; every change keeps within the capacities."""

    def __init__(self, lengths: Sequence[int], lanes: Sequence[Lane], cost: Cost) -> None:
        self.lengths, self.lanes, self.cost = lengths, lanes, cost
        self.batches = [
            [MicroBatchFilling(number, place) for place in range(lane.micro_batches)]
            for number, lane in enumerate(lanes)
        ]
        self.totals = [0.0 for _ in lanes]
        # What a document costs by itself in each pipeline; nothing pays for one that does not fit.
        alone = [
            [cost(number, [length]) if lane.holds(length) else np.inf for length in lengths]
            for number, lane in enumerate(lanes)
        ]
        self.alone = np.array(alone).reshape(len(lanes), len(lengths))
        self._least = [[(0.0, place) for place in range(len(own))] for own in self.batches]
        self._shortest = min(lengths, default=0)

    def place(self, document: int) -> None:
        """Into the least loaded micro-batch with room, of the pipeline that would be done soonest."""
        length = self.lengths[document]
        best: tuple[float, MicroBatchFilling, float] | None = None
        for number, lane in enumerate(self.lanes):
            if lane.holds(length):
                batch = self._with_room(number, length)
                cost = self._cost(number, [*batch.documents, document])
                done = self.totals[number] - batch.cost + cost
                if best is None or done < best[0]:
                    best = (done, batch, cost)
        assert best is not None, "documents that fit nowhere are refused before"
        _, batch, cost = best
        if batch.place == len(self.batches[batch.lane]):
            self.batches[batch.lane].append(batch)
        self._put(batch, [*batch.documents, document], cost)

    def exchange(self, heavy: Sequence[MicroBatchFilling], light: Sequence[MicroBatchFilling]) -> bool:
        """Move one document from `heavy` to `light`, or swap two, so that the heavier side gets lighter; or do not.

        `heavy` and `light` are micro-batches of one pipeline each; the load of a side is the sum of their costs.
        """
        load, other = sum(batch.cost for batch in heavy), sum(batch.cost for batch in light)
        ours = self._looked_at(heavy)
        theirs: list[tuple[MicroBatchFilling, int | None]] = [(batch, None) for batch in light]
        theirs += self._looked_at(light)
        if not ours or not theirs:
            return False
        down = self._costs(heavy[0].lane, ours)[:, None] - self._costs(heavy[0].lane, theirs)
        up = self._costs(light[0].lane, ours)[:, None] - self._costs(light[0].lane, theirs)
        # By what documents cost alone; what they cost together is asked for the most promising only.
        after = np.where(np.isfinite(down) & np.isfinite(up), np.maximum(load - down, other + up), np.inf)
        for flat in np.argsort(after, axis=None, kind="stable")[:TRIED].tolist():
            mine, yours = divmod(flat, len(theirs))
            if after[mine, yours] < load and self._swap(ours[mine], theirs[yours], load, other):
                return True
        return False

    def _swap(
        self,
        ours: tuple[MicroBatchFilling, int | None],
        theirs: tuple[MicroBatchFilling, int | None],
        load: float,
        other: float,
    ) -> bool:
        (heavy, given), (light, taken) = ours, theirs
        kept = [each for each in heavy.documents if each != given] + ([] if taken is None else [taken])
        got = [each for each in light.documents if each != taken] + ([] if given is None else [given])
        if not (self._holds(heavy.lane, kept) and self._holds(light.lane, got)):
            return False
        down, up = self._cost(heavy.lane, kept), self._cost(light.lane, got)
        if max(load - heavy.cost + down, other - light.cost + up) > load * (1 - GAIN):
            return False
        self._put(heavy, kept, down)
        self._put(light, got, up)
        return True

    def _with_room(self, lane: int, length: int) -> MicroBatchFilling:
        """The least loaded micro-batch that holds a document of this length too, or a new one."""
        heap, own = self._least[lane], self.batches[lane]
        passed: list[tuple[float, int]] = []
        found = MicroBatchFilling(lane, len(own))
        while heap:
            cost, place = heap[0]
            batch = own[place]
            if cost == batch.cost and self.lanes[lane].holds(batch.tokens + length):
                found = batch
                break
            heapq.heappop(heap)
            if cost == batch.cost and self.lanes[lane].holds(batch.tokens + self._shortest):
                passed.append((cost, place))
        for each in passed:
            heapq.heappush(heap, each)
        return found

    def _put(self, batch: MicroBatchFilling, documents: list[int], cost: float) -> None:
        self.totals[batch.lane] += cost - batch.cost
        batch.documents, batch.cost = documents, cost
        batch.tokens = sum([self.lengths[each] for each in documents])
        heapq.heappush(self._least[batch.lane], (cost, batch.place))

    def _cost(self, lane: int, documents: Sequence[int]) -> float:
        return self.cost(lane, [self.lengths[each] for each in documents]) if documents else 0.0

    def _holds(self, lane: int, documents: Sequence[int]) -> bool:
        return not documents or self.lanes[lane].holds(sum([self.lengths[each] for each in documents]))

    def _looked_at(self, batches: Sequence[MicroBatchFilling]) -> list[tuple[MicroBatchFilling, int | None]]:
        """Documents of these micro-batches, the shortest where there are very many."""
        found = [(batch, each) for batch in batches for each in batch.documents]
        found.sort(key=lambda entry: (self.lengths[entry[1]], entry[1]))
        return list(found[:LOOKED_AT])

    def _costs(
        self, lane: int, entries: Sequence[tuple[MicroBatchFilling, int | None]]
    ) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.array([0.0 if each is None else self.alone[lane][each] for _, each in entries])
