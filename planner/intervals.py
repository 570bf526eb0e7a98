"""Length intervals and a layout for each of them, by dynamic programming (paper A.1, scenario c).

Documents of one interval go to pipelines of one layout; the slowest interval is the step. `best_of` goes through the
interval's borders from the shortest documents on and keeps, for every border and number of devices, the few best ways.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.layouts import Composition, Layout
from hetero_megatron.planner.pipeline_work import Floats, PipelineWork
from hetero_megatron.planner.sharing import FILLED

SLOWER = 1.1


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A layout as the programme knows it: what it costs, and the most tokens of its micro-batches."""

    layout: Layout
    work: PipelineWork
    capacity: int


class Loads:
    """What the documents of length intervals cost in the mean step."""

    def __init__(self, steps: Sequence[NDArray[np.int64]], ends: Sequence[int]) -> None:
        """`ends`: ascending ends of the intervals; no document is longer than the last one."""
        self.steps, self.ends = tuple(steps), tuple(ends)
        self._lengths = np.concatenate([np.asarray(step, dtype=np.int64) for step in steps])
        places = np.searchsorted(np.array(ends), self._lengths, side="left")
        self._places, count = places, len(ends)
        self._tokens = np.concatenate(
            ([0.0], np.cumsum(np.bincount(places, self._lengths, count)) / len(steps))
        )
        self._documents = np.concatenate(
            ([0.0], np.cumsum(np.bincount(places, minlength=count)) / len(steps))
        )
        # The longest document of each step in each interval.
        self._longest = np.zeros((len(steps), count))
        step = np.repeat(np.arange(len(steps)), [len(each) for each in steps])
        np.maximum.at(self._longest, (step, places), self._lengths)
        self._costs: dict[int, Floats] = {}

    def seconds(self, option: Option, count: int, first: int, end: int) -> float:
        """Of `count` pipelines that take the documents of the intervals [first, end)."""
        work = option.work
        if id(work) not in self._costs:
            each = np.bincount(self._places, work.alone(self._lengths), len(self.ends))
            self._costs[id(work)] = np.concatenate(([0.0], np.cumsum(each) / len(self.steps)))
        sums = self._costs[id(work)]
        load = float(sums[end] - sums[first]) / count
        documents = float(self._documents[end] - self._documents[first])
        tokens = float(self._tokens[end] - self._tokens[first]) / count
        if documents <= 0:
            return 0.0
        longest = self._longest[:, first:end].max(axis=1)
        # One document is not cut: no pipeline of several is done before the one that has the longest.
        alone = float(work.alone(np.ceil(longest).astype(np.int64)).mean())
        load = max(load, alone)
        batches = work.best_count(
            load, ceil(tokens / (FILLED * option.capacity)), max(1, round(documents / count))
        )
        return work.seconds(load, batches, max(alone, load / batches))


Way = tuple[float, Composition]


def best_of(loads: Loads, options: Sequence[Option], devices: int, keep: int = 6) -> tuple[Way, ...]:
    """The best compositions for all documents, the quickest first; fewer than `devices` may be used.

    The seconds are the slowest interval's. Exact for one `keep`, as every part of a best way is a best way.
    """
    unit = gcd(devices, *(option.layout.devices for option in options)) if options else 1
    most, count = devices // unit, len(loads.ends)
    limit = _limit(loads, options, devices)
    table: list[list[list[Way]]] = [[[] for _ in range(most + 1)] for _ in range(count + 1)]
    table[0][0] = [(0.0, ())]
    for end in range(1, count + 1):
        fitting = [option for option in options if option.capacity >= loads.ends[end - 1]]
        for first in range(end):
            for option in fitting:
                size = option.layout.devices // unit
                for number in range(1, most // size + 1):
                    seconds = loads.seconds(option, number, first, end)
                    if seconds > limit:
                        continue
                    for used in range(most - number * size + 1):
                        ways = table[end][used + number * size]
                        for before, way in table[first][used]:
                            slower = max(before, seconds)
                            if len(ways) < keep or slower < ways[-1][0]:
                                _add(ways, (slower, _joined(way, option.layout, number)), keep)
    found: list[Way] = []
    for ways in table[count]:
        for own in ways:
            _add(found, own, keep * (most + 1))
    return tuple(found)


def _limit(loads: Loads, options: Sequence[Option], devices: int) -> float:
    """Ways that are slower than the best with one layout only, and a bit more, are of no interest."""
    whole = [
        loads.seconds(option, devices // option.layout.devices, 0, len(loads.ends))
        for option in options
        if option.capacity >= loads.ends[-1] and option.layout.devices <= devices
    ]
    return SLOWER * min(whole, default=float("inf"))


def _joined(ways: Composition, layout: Layout, number: int) -> Composition:
    counts = dict(ways)
    counts[layout] = counts.get(layout, 0) + number
    return tuple(sorted(counts.items(), key=lambda each: (-each[0].devices, each[0])))


def _add(ways: list[Way], way: Way, keep: int) -> None:
    """Put a way where it belongs, the same composition once."""
    if len(ways) >= keep and way >= ways[-1]:
        return
    for place, other in enumerate(ways):
        if other[1] == way[1]:
            if way < other:
                ways.pop(place)
                break
            return
    insort(ways, way)
    del ways[keep:]
