"""Level 2, exactly: layers per stage and micro-batches per pipeline (paper A.1).

This is what runs inside level 1, thousands of times; `level_two_ilp` says the same as integer programs.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np

from hetero_megatron.errors import PlannerError


@dataclass(frozen=True)
class StageLoad:
    """What a stage costs, per micro-batch, and what its memory takes.

    Attributes:
        fixed: seconds whatever the layers: embedding, head, sending.
        per_layer: seconds of a layer whose activations are kept.
        layer_bytes: states of a layer and its activations of all micro-batches in flight.
        room_bytes: the device's memory less what does not depend on layers.
        again: seconds that a recomputed layer takes; 0 where recomputation is not allowed.
        again_bytes: `layer_bytes` of a recomputed layer.
    """

    fixed: float
    per_layer: float
    layer_bytes: float = 0.0
    room_bytes: float = inf
    again: float = 0.0
    again_bytes: float = 0.0

    def most(self, total: int) -> int:
        """Most layers that fit, `total` at most."""
        if self.room_bytes < 0:
            return 0
        least = self.again_bytes if self.again else self.layer_bytes
        return total if least * total <= self.room_bytes else int(self.room_bytes / least)

    def recomputed(self, layers: int) -> int:
        """How many of so many layers are recomputed: as few as memory allows."""
        over = self.layer_bytes * layers - self.room_bytes
        if over <= 0 or not self.again:
            return 0
        return min(layers, ceil(over / (self.layer_bytes - self.again_bytes) - 1e-9))

    def seconds(self, layers: int) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.fixed + self.per_layer * layers + (self.again - self.per_layer) * self.recomputed(layers)

    def table(self, total: int) -> list[float]:
        """Seconds of 1, 2, ... layers, as many as fit."""
        tables = self._tables
        if total not in tables:
            most = self.most(total)
            if self.is_straight(most):
                tables[total] = [self.fixed + self.per_layer * n for n in range(1, most + 1)]
            else:
                tables[total] = [self.seconds(n) for n in range(1, most + 1)]
        return tables[total]

    @cached_property
    def free(self) -> "StageLoad":
        """The same if memory had no limit."""
        return self if self.room_bytes == inf else StageLoad(self.fixed, self.per_layer)

    @cached_property
    def _tables(self) -> dict[int, list[float]]:
        return {}

    def is_straight(self, total: int) -> bool:
        """Whether no number of layers up to `total` that fits needs recomputation."""
        return not self.again or self.layer_bytes * total <= self.room_bytes


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """What a pipeline costs: `first` seconds with one micro-batch, `each` more with every further one."""

    first: float
    each: float

    def seconds(self, micro_batches: int) -> float:
        """Seconds of this many; none takes none."""
        return self.first + self.each * (micro_batches - 1) if micro_batches else 0.0


def closed_form(stages: Sequence[StageLoad], layers: Sequence[int], micro_batches: int) -> float:
    """(m - 1) slowest stage + sum of the stages: a 1F1B pipeline whose slowest stage never waits."""
    seconds = [stage.seconds(count) for stage, count in zip(stages, layers, strict=True)]
    return (micro_batches - 1) * max(seconds) + sum(seconds)


def split_layers(
    total: int, stages: Sequence[StageLoad], micro_batches: int, quick: bool = False
) -> tuple[int, ...] | None:
    """Layers of each stage, one at least, that minimise `closed_form`; None where they do not fit into memory.

    Exact: for every value that the slowest stage can take, the split of least sum among those within that value.
    Where no stage recomputes, layers go to the cheapest stages first, as many as that value and memory allow;
    moving a layer from there to another stage saves nothing. Where one does, a dynamic program over stages, or with
    `quick` first all kept layers and then all recomputed ones, cheapest first, which may miss the best by a layer.
    """
    mosts = [stage.most(total) for stage in stages]
    if min(mosts) < 1 or sum(mosts) < total or total < len(stages):
        return None
    if any(stage.room_bytes < inf for stage in stages):
        # Where the best split without limits fits and recomputes nothing, no limit changes it.
        loose = without_limits(total, stages, micro_batches)
        if all(stage.layer_bytes * n <= stage.room_bytes for stage, n in zip(stages, loose, strict=True)):
            return loose
    tables = [stage.table(total) for stage in stages]
    straight = all(stage.is_straight(total) for stage in stages)
    order = sorted(range(len(stages)), key=lambda s: (stages[s].per_layer, s))

    def fill(slowest: float) -> tuple[int, ...] | None:
        rooms = [bisect_right(table, slowest) for table in tables]
        if min(rooms) < 1 or sum(rooms) < total:
            return None
        if straight:
            return _greedy(total, rooms, order)
        return _in_two_rounds(total, rooms, stages) if quick else _by_dynamic_program(total, rooms, tables)

    def value(layers: tuple[int, ...]) -> tuple[float, float]:
        seconds = [table[n - 1] for table, n in zip(tables, layers, strict=True)]
        return max(seconds), sum(seconds)

    loosest = fill(inf)
    assert loosest is not None, "the memory limits were checked above"
    least_sum = value(loosest)[1]
    best: tuple[float, tuple[int, ...]] | None = None
    for slowest in _slowest_values(total, tables):
        if best is not None and (micro_batches - 1) * slowest + least_sum >= best[0]:
            break
        layers = fill(slowest)
        if layers is not None:
            top, all_of_them = value(layers)
            found = (micro_batches - 1) * top + all_of_them, layers
            best = found if best is None else min(best, found)
    return None if best is None else best[1]


def without_limits(total: int, stages: Sequence[StageLoad], micro_batches: int) -> tuple[int, ...]:
    """The best split if memory had no limits: no limit and no recomputation can improve on it."""
    free = [stage.free for stage in stages]
    layers = split_layers(total, free, micro_batches)
    assert layers is not None, "there is at least one layer for each stage"
    return layers


def _slowest_values(total: int, tables: Sequence[Sequence[float]]) -> list[float]:
    """What the slowest stage's seconds can be, ascending, from the least with which all layers find a place."""
    values = sorted({value for table in tables for value in table})
    lo, hi = 0, len(values) - 1
    while lo < hi:
        middle = (lo + hi) // 2
        rooms = [bisect_right(table, values[middle]) for table in tables]
        if min(rooms) >= 1 and sum(rooms) >= total:
            hi = middle
        else:
            lo = middle + 1
    return values[lo:]


def _greedy(total: int, rooms: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """One layer each, the others to the cheapest stages that have room."""
    layers, left = [1] * len(rooms), total - len(rooms)
    for s in order:
        more = min(rooms[s] - 1, left)
        layers[s] += more
        left -= more
    return tuple(layers)


def _in_two_rounds(total: int, rooms: Sequence[int], stages: Sequence[StageLoad]) -> tuple[int, ...]:
    """One layer each, then layers that can be kept, then layers for which others are recomputed; cheapest first."""
    offers: list[tuple[float, int, int]] = []
    for s, (room, stage) in enumerate(zip(rooms, stages, strict=True)):
        limited = stage.again and stage.layer_bytes * room > stage.room_bytes
        kept = int(stage.room_bytes / stage.layer_bytes) if limited else room
        offers.append((stage.per_layer, s, max(0, kept - 1)))
        if room > max(kept, 1):
            more = (stage.seconds(room) - stage.seconds(max(kept, 1))) / (room - max(kept, 1))
            offers.append((more, s, room - max(kept, 1)))
    layers, left = [1] * len(rooms), total - len(rooms)
    for _, s, room in sorted(offers):
        taken = min(room, left)
        layers[s] += taken
        left -= taken
    return tuple(layers)


def _by_dynamic_program(
    total: int, rooms: Sequence[int], tables: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """The split of least sum: best[j] of j layers on the stages so far, and how many the last of them took."""
    best = np.full(total + 1, inf)
    best[0] = 0.0
    taken = []
    for room, table in zip(rooms, tables, strict=True):
        # Row n - 1 is what j layers cost if this stage takes n of them.
        rows = np.full((room, total + 1), inf)
        for n in range(1, min(room, total) + 1):
            rows[n - 1, n:] = best[: total + 1 - n] + table[n - 1]
        choice = rows.argmin(axis=0)
        best = rows[choice, np.arange(total + 1)]
        taken.append(choice + 1)
    layers, left = [], total
    for choice in reversed(taken):
        layers.append(int(choice[left]))
        left -= layers[-1]
    return tuple(reversed(layers))


def check_layers(total: int, stages: Sequence[StageLoad], layers: Sequence[int]) -> None:
    """Plain arithmetic on a split, whoever made it.

    Raises:
        PlannerError: a count that is not whole, a sum that is not the model's, or a stage that is over its memory.
    """
    if any(n != int(n) or n < 1 for n in layers):
        raise PlannerError(f"layers {list(layers)}: every stage needs a whole number of layers, 1 or more")
    if sum(layers) != total:
        raise PlannerError(f"layers {list(layers)} are {sum(layers)} together, the model has {total}")
    for s, (stage, n) in enumerate(zip(stages, layers, strict=True)):
        if n > stage.most(total):
            raise PlannerError(f"stage {s} has {n} layers, and its memory takes {stage.most(total)}")


def deal_micro_batches(total: int, pipelines: Sequence[PipelineLoad]) -> tuple[int, ...]:
    """Micro-batches of each pipeline, together `total`, that minimise the slowest pipeline's seconds.

    Exact: each micro-batch goes to the pipeline that would end first with it. Seconds grow with every micro-batch,
    so taking any of them back and giving it elsewhere ends no earlier.

    Raises:
        PlannerError: there is no micro-batch or no pipeline.

    >>> deal_micro_batches(64, [PipelineLoad(1.0, 1.0)] * 3)
    (22, 21, 21)
    """
    check_counts(total, len(pipelines))
    counts = [0] * len(pipelines)
    queue = [(load.seconds(1), p) for p, load in enumerate(pipelines)]
    heapq.heapify(queue)
    for _ in range(total):
        _, p = queue[0]
        counts[p] += 1
        heapq.heapreplace(queue, (pipelines[p].seconds(counts[p] + 1), p))
    return tuple(counts)


def check_micro_batches(total: int, counts: Sequence[int]) -> None:
    """Plain arithmetic on counts, whoever made them.

    Raises:
        PlannerError: a count that is not whole or is negative, or a sum that is not `total`.
    """
    if any(n != int(n) or n < 0 for n in counts):
        raise PlannerError(f"micro-batches {list(counts)}: every pipeline needs a whole number, 0 or more")
    if sum(counts) != total:
        raise PlannerError(f"micro-batches {list(counts)} are {sum(counts)} together, a step has {total}")


def check_counts(total: int, pipelines: int) -> None:
    """Refuse a deal with nothing on one side.

    Raises:
        PlannerError: there is no micro-batch or no pipeline.
    """
    if pipelines < 1:
        raise PlannerError("no pipeline to deal micro-batches to; a plan needs a device")
    if total < 1:
        raise PlannerError(f"{total} sequences to deal out; global_batch_size is 1 or more")
