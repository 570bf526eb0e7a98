"""Level 1 and 2 together, exactly, for small inputs: branch and bound with bounds that never cut the best plan off.

The space: every lane of blocks in every order, every split of layers, every number of micro-batches, each ZeRO choice,
and for every lane that does not fit otherwise, one kind of recomputation for as few layers as memory asks for.

Bounds: a pipeline takes at least its micro-batches times its slowest stage; a step at least its slowest pipeline with
neighbours as near as they can be, and the update of its fullest rank. Everything that is below the best step so far
gets ranks, in every way that differs, and is timed by the cost model.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import inf

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.lanes import Blocks, Lane, Lanes, Setting
from hetero_megatron.planner.level_two import PipelineLoad
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.realize import Priced, price, strategy_of
from hetero_megatron.planner.sketch import Draft, Sketch

DEVICES, KINDS, LAYERS, BATCH = 8, 2, 12, 32
MOST_TIMED = 8000
"""Strategies that are timed before the search gives up on a proof."""
WON = 1e-9
"""A step is shorter if it is shorter by more than this share."""


def is_small(problem: Problem) -> bool:
    """Whether the search is sure to end soon."""
    return (
        len(problem.cluster.devices) <= DEVICES
        and len(problem.supply.count) <= KINDS
        and problem.config.num_layers <= LAYERS
        and problem.global_batch_size <= BATCH
    )


def exact(problem: Problem, costs: Costs, start: Priced | None) -> tuple[Priced | None, bool]:
    """The best strategy, and whether that is proven; `start` is one that fits, if one is known."""
    search = _Search(problem, costs, start)
    for rows in problem.rows:
        search.run(rows)
    return search.best, search.timed < MOST_TIMED


@dataclass(frozen=True, slots=True)
class _Split:
    """A lane with one split of its layers."""

    lane: Lane
    seconds: float


class _Search:
    def __init__(self, problem: Problem, costs: Costs, start: Priced | None) -> None:
        self.problem, self.costs, self.best, self.timed = problem, costs, start, 0
        self.prices = Prices(problem, costs)
        self.lanes = Lanes(self.prices, quick=False)
        self._splits: dict[tuple[Blocks, Setting, int], list[_Split]] = {}

    @property
    def limit(self) -> float:
        return inf if self.best is None else self.best.seconds * (1 - WON)

    def _takes(self, slowest: float) -> int:
        """Most micro-batches within the limit."""
        most = self.problem.global_batch_size
        return most if self.limit == inf else min(most, int(self.limit / slowest))

    def run(self, rows: int) -> None:
        total = self.problem.global_batch_size // rows
        lanes = [(blocks, self._fastest(blocks, rows)) for blocks in self._all_lanes()]
        lanes.sort(key=lambda each: (-1 / each[1] / sum(b.ranks for b in each[0]), each[0]))
        for chosen in self._groups(lanes, total, [], 0, rows):
            if self.timed >= MOST_TIMED:
                return
            self._settle(chosen, rows, total)

    def _all_lanes(self) -> Iterator[Blocks]:
        """Every sequence of blocks of one context-parallel size that there are devices for."""
        for cp in self.problem.parts:
            options = [block for own in self.problem.blocks.values() for block in own if block.cp == cp]
            yield from self._longer((), options)

    def _longer(self, lane: Blocks, options: Sequence[Block]) -> Iterator[Blocks]:
        for block in options:
            found = (*lane, block)
            if len(found) <= self.problem.config.num_layers and self.problem.supply.holds(found):
                yield found
                yield from self._longer(found, options)

    def _fastest(self, blocks: Blocks, rows: int) -> float:
        """The least that the slowest stage can take if memory had no limits: whole layers, ends included."""
        total = self.problem.config.num_layers
        each = [self.prices.layer(block, rows).total for block in blocks]
        extra = [0.0] * len(blocks)
        extra[0] += self.prices.end(blocks[0], rows, False).total
        extra[-1] += self.prices.end(blocks[-1], rows, True).total
        values = sorted({extra[s] + each[s] * n for s in range(len(blocks)) for n in range(1, total + 1)})
        for value in values:
            rooms = [int((value - extra[s]) / each[s] + 1e-9) for s in range(len(blocks))]
            if min(rooms) >= 1 and sum(rooms) >= total:
                return value
        return values[-1]

    def _groups(
        self, lanes: Sequence[tuple[Blocks, float]], left: int, chosen: list[Blocks], start: int, rows: int
    ) -> Iterator[list[Blocks]]:
        """Every multiset of lanes that there are devices for and that could take all micro-batches in time."""
        if chosen and left <= 0:
            yield list(chosen)
        allowed = self.problem.choices.pipelines
        if allowed and len(chosen) >= max(allowed):
            return
        for n in range(start, len(lanes)):
            blocks, slowest = lanes[n]
            takes = self._takes(slowest)
            if takes < 1 or len(chosen) >= self.problem.global_batch_size:
                continue
            if not self.problem.supply.holds([b for lane in (*chosen, blocks) for b in lane]):
                continue
            if left > takes and not self._could(left - takes, [*chosen, blocks], rows):
                continue
            yield from self._groups(lanes, left - takes, [*chosen, blocks], n, rows)

    def _could(self, left: int, chosen: list[Blocks], rows: int) -> bool:
        """Whether the devices that are left could take so many micro-batches within the limit at all."""
        used = Counter(block.kind for lane in chosen for block in lane for _ in range(block.ranks))
        speed = 0.0
        for kind, own in self.problem.blocks.items():
            if own:
                best = max(1 / self.prices.layer(b, rows).total / b.ranks for b in own)
                speed += (self.problem.supply.count[kind] - used[kind]) * best
        return speed * self.limit / self.problem.config.num_layers >= left * (1 - 1e-9)

    def _settle(self, chosen: list[Blocks], rows: int, total: int) -> None:
        """Every number of micro-batches and every split of layers of these lanes that is below the best step."""
        allowed = self.problem.choices.pipelines
        if allowed and len(chosen) not in allowed:
            return
        most = [self._takes(self._fastest(blocks, rows)) for blocks in chosen]
        for counts in _shares(total, most):
            if any(a == b and m < n for (a, m), (b, n) in pairwise(zip(chosen, counts, strict=True))):
                continue  # equal lanes: the first takes most
            for zero in self.problem.choices.zero:
                if zero and 0 in self.problem.choices.zero and len(chosen) * chosen[0][0].cp == 1:
                    continue
                setting = Sketch(tuple(chosen), rows, zero).setting
                options = [
                    self._within(blocks, setting, count) for blocks, count in zip(chosen, counts, strict=True)
                ]
                for splits in product(*options):
                    if max(split.seconds for split in splits) < self.limit:
                        self._time(splits, counts, rows, zero)
                        if self.timed >= MOST_TIMED:
                            return

    def _within(self, blocks: Blocks, setting: Setting, count: int) -> list[_Split]:
        key = (blocks, setting, count)
        if key not in self._splits:
            found = list(self._every_split(blocks, setting, count))
            self._splits[key] = sorted(found, key=lambda each: (each.seconds, each.lane.layers))
        return [split for split in self._splits[key] if split.seconds < self.limit]

    def _every_split(self, blocks: Blocks, setting: Setting, count: int) -> Iterator[_Split]:
        total, depth = self.problem.config.num_layers, len(blocks)
        kinds = ("none", *self.problem.choices.recompute)
        loads = {kind: self.lanes.loads(blocks, setting, count, kind) for kind in kinds}
        for cuts in combinations(range(1, total), depth - 1):
            layers = tuple(b - a for a, b in pairwise((0, *cuts, total)))
            for kind in kinds:
                if any(n > load.most(total) for n, load in zip(layers, loads[kind], strict=True)):
                    continue
                again = tuple(load.recomputed(n) for n, load in zip(layers, loads[kind], strict=True))
                slowest = max(load.seconds(n) for n, load in zip(layers, loads[kind], strict=True))
                if count * slowest < self.limit:
                    stages = self.lanes.stage_seconds(blocks, setting.rows, layers, again, kind)
                    seconds = self.lanes.pipeline_seconds(blocks, setting.rows, stages, count)
                    if seconds < self.limit:
                        load = PipelineLoad(seconds, slowest)
                        yield _Split(Lane(blocks, setting.rows, layers, kind, again, load), seconds)
                if not any(again):
                    break  # whatever the kind, nothing is recomputed

    def _time(self, splits: Sequence[_Split], counts: Sequence[int], rows: int, zero: int) -> None:
        lanes = tuple(split.lane for split in splits)
        sketch = Sketch(tuple(lane.blocks for lane in lanes), rows, zero)
        draft = Draft(sketch, lanes, tuple(counts), 0.0, 0.0)
        for ranks in every_place(self.problem, sketch.lanes):
            strategy = strategy_of(draft, ranks, self.problem.cluster, zero)
            self.timed += 1
            found = price(strategy, self.problem.cluster, self.costs)
            if found is not None and found.seconds < self.limit:
                self.best = found


def _shares(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give 1 or more to each, at most so many, together `total`."""
    if len(most) == 1:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    for first in range(min(most[0], total - len(most) + 1), 0, -1):
        for rest in _shares(total - first, most[1:]):
            yield (first, *rest)


def every_place(
    problem: Problem, lanes: Sequence[Blocks]
) -> Iterator[dict[tuple[int, int], tuple[int, ...]]]:
    """Every way to put blocks into nodes that differs: nodes alike, and still as full, stand for each other."""
    places = [(p, s, block) for p, lane in enumerate(lanes) for s, block in enumerate(lane)]
    places.sort(key=lambda each: (-each[2].ranks, each[0], each[1]))
    sites: dict[tuple[str, int], tuple[int, ...]] = {}
    for device in problem.cluster.devices:
        site = (device.kind, device.node)
        sites[site] = (*sites.get(site, ()), device.rank)
    yield from _placed(places, 0, sites, {}, dict.fromkeys(sites, ()))


def _placed(
    places: Sequence[tuple[int, int, Block]],
    n: int,
    free: dict[tuple[str, int], tuple[int, ...]],
    found: dict[tuple[int, int], tuple[int, ...]],
    history: dict[tuple[str, int], tuple[int, ...]],
) -> Iterator[dict[tuple[int, int], tuple[int, ...]]]:
    if n == len(places):
        yield dict(found)
        return
    p, s, block = places[n]
    seen = set()
    if block.spread:
        ranks: tuple[int, ...] = ()
        whole = [site for site in sorted(free) if site[0] == block.kind and not history[site]]
        for site in whole:
            if len(ranks) < block.ranks:
                ranks += free[site]
        if len(ranks) == block.ranks:
            used = {site for site in whole if free[site] and free[site][0] in ranks}
            yield from _placed(
                places,
                n + 1,
                {site: () if site in used else own for site, own in free.items()},
                {**found, (p, s): ranks},
                {site: (*history[site], n) if site in used else history[site] for site in history},
            )
        return
    for site, own in free.items():
        # Nodes of a kind with as many devices left and the same stages on them are alike.
        alike = (site[0], len(own), history[site])
        if site[0] != block.kind or len(own) < block.ranks or alike in seen:
            continue
        seen.add(alike)
        yield from _placed(
            places,
            n + 1,
            {**free, site: own[block.ranks :]},
            {**found, (p, s): own[: block.ranks]},
            {**history, site: (*history[site], n)},
        )


__all__ = ["every_place", "exact", "is_small"]
