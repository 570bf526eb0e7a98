"""Level 1 and 2 together, exactly, for small inputs: branch and bound with bounds that never cut the best plan off.

The space: every lane of blocks in every order, every split of layers, every number of micro-batches, each ZeRO choice,
and for every lane that does not fit otherwise, one kind of recomputation for as few layers as memory asks for.

Bounds: of a lane by itself, `exact_lanes`; of a set of lanes, by dynamic programming how many micro-batches the devices
that are left can take in time; of a whole strategy, its step if all devices of a kind were in one node. Everything that is
below the best step so far gets ranks, in every way that differs, and is timed by the cost model.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from math import inf

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.exact_lanes import LaneSplits, Split, near_cluster
from hetero_megatron.planner.lanes import Blocks, Setting
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.realize import Priced, price, strategy_of
from hetero_megatron.planner.sketch import Draft, Sketch

DEVICES, KINDS, LAYERS, BATCH = 8, 2, 12, 32
MOST_TIMED = 30000
"""Strategies that are timed before the search gives up on a proof."""
FIRST_TIMED = 500
"""Of one setting, before the others have had a look."""
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
    left = search.settings()
    # A look at every setting first: what is found under one makes the others short.
    for allowed in (FIRST_TIMED, MOST_TIMED):
        left = [each for each in left if not search.run(*each, min(search.timed + allowed, MOST_TIMED))]
    return search.best, not left


class _Search:
    def __init__(self, problem: Problem, costs: Costs, start: Priced | None) -> None:
        self.problem, self.costs, self.best, self.timed = problem, costs, start, 0
        self.splits = LaneSplits(Prices(problem, costs))
        near = near_cluster(problem.cluster)
        self.near = None if near is None else costs.on(near)
        self.kinds = tuple(problem.supply.count)
        self.ranks = {
            kind: tuple(device.rank for device in problem.cluster.devices if device.kind == kind)
            for kind in self.kinds
        }
        self.holds = cache(problem.supply.holds)
        self._lanes: dict[int, tuple[Blocks, ...]] = {}

    @property
    def limit(self) -> float:
        return inf if self.best is None else self.best.seconds * (1 - WON)

    def settings(self) -> list[tuple[Setting, int]]:
        """What all lanes of a plan share, and their context-parallel size; first those of the best plan so far."""
        problem = self.problem
        found: dict[tuple[Setting, int], None] = {}
        for rows, cp, zero in product(problem.rows, problem.parts, problem.choices.zero):
            most = min(problem.global_batch_size // rows, len(problem.cluster.devices) // cp)
            for count in problem.choices.pipelines or range(1, most + 1):
                cut = zero if count * cp > 1 else 0
                for whole in (False, True) if cut else (False,):
                    if count <= most:
                        found[Setting(rows, count * cp, cut, whole), cp] = None
        best = self.best.strategy.pipelines if self.best else ()
        alike = (best[0].micro_batch_size, len(best)) if best else None
        return sorted(found, key=lambda each: (each[0].rows, each[0].replicas // each[1]) != alike)

    def run(self, setting: Setting, cp: int, most_timed: int) -> bool:
        """Everything under one setting, until so many strategies were timed in all; whether that was enough."""
        total, count = self.problem.global_batch_size // setting.rows, setting.replicas // cp
        within: list[tuple[Blocks, list[list[Split]]]] = []
        for blocks in self._all_lanes(cp):
            if setting.whole and any(block.tp > 1 for block in blocks):
                continue
            own: list[list[Split]] = []
            # More micro-batches take longer and need no less memory.
            while len(own) <= total - count and (
                found := self.splits.within(blocks, setting, len(own) + 1, self.limit)
            ):
                own.append(found)
            if own:
                within.append((blocks, own))
        # The fastest first, so that the limit falls early.
        within.sort(key=lambda each: (-len(each[1]), each[1][-1][0].seconds, each[0]))
        for chosen in _Sets(self, [(blocks, len(own)) for blocks, own in within], count, total).all():
            if self.timed >= most_timed:
                return False
            options = [
                [split for split in within[n][1][m - 1] if split.seconds < self.limit] for n, m in chosen
            ]
            for splits in product(*options):
                if any(
                    a == b and x > y
                    for (a, x), (b, y) in pairwise(zip(chosen, map(_key, splits), strict=True))
                ):
                    continue  # equal lanes with equal counts stand in one order
                if max(split.seconds for split in splits) < self.limit:
                    self._time(splits, [m for _, m in chosen], setting)
        return True

    def _all_lanes(self, cp: int) -> tuple[Blocks, ...]:
        """Every sequence of blocks of one context-parallel size that there are devices for."""
        if cp not in self._lanes:
            options = [block for own in self.problem.blocks.values() for block in own if block.cp == cp]
            self._lanes[cp] = tuple(self._longer((), options))
        return self._lanes[cp]

    def _longer(self, lane: Blocks, options: Sequence[Block]) -> Iterator[Blocks]:
        for block in options:
            found = (*lane, block)
            if len(found) <= self.problem.config.num_layers and self.holds(tuple(sorted(found))):
                yield found
                yield from self._longer(found, options)

    def _time(self, splits: Sequence[Split], counts: Sequence[int], setting: Setting) -> None:
        lanes = tuple(split.lane for split in splits)
        sketch = Sketch(tuple(lane.blocks for lane in lanes), setting.rows, setting.zero)
        if sketch.setting != setting:
            return  # no lane has tensor parallelism: another setting's
        draft = Draft(sketch, lanes, tuple(counts), 0.0, 0.0)
        self.timed += 1
        if self.near is not None and self._near_seconds(draft) >= self.limit:
            return
        for ranks in every_place(self.problem, sketch.lanes):
            strategy = strategy_of(draft, ranks, self.problem.cluster, setting.zero)
            self.timed += 1
            found = price(strategy, self.problem.cluster, self.costs)
            if found is not None and found.seconds < self.limit:
                self.best = found

    def _near_seconds(self, draft: Draft) -> float:
        """A step if all devices of a kind were in one node."""
        assert self.near is not None
        used = dict.fromkeys(self.kinds, 0)
        ranks = {}
        for p, lane in enumerate(draft.lanes):
            for s, block in enumerate(lane.blocks):
                first = used[block.kind]
                used[block.kind] += block.ranks
                ranks[p, s] = self.ranks[block.kind][first : first + block.ranks]
        return self.near.step(strategy_of(draft, ranks, self.near.cluster, draft.sketch.zero)).seconds


def _key(split: Split) -> tuple[str, tuple[int, ...]]:
    return split.lane.recompute, split.lane.layers


class _Sets:
    """Sets of so many lanes that take all micro-batches in time, each lane with a number of them."""

    def __init__(self, search: _Search, lanes: Sequence[tuple[Blocks, int]], count: int, total: int) -> None:
        """`lanes`: each with the most micro-batches that it takes."""
        self.search, self.lanes, self.count, self.total = search, lanes, count, total
        self.sizes = [
            tuple(sum(block.ranks for block in blocks if block.kind == kind) for kind in search.kinds)
            for blocks, _ in lanes
        ]
        self.best: dict[tuple[int, ...], int] = {}
        for size, (_, most) in zip(self.sizes, lanes, strict=True):
            self.best[size] = max(most, self.best.get(size, 0))
        self.most = cache(self._most)

    def all(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """(number of the lane, micro-batches) of each lane, ascending."""
        free = tuple(self.search.problem.supply.count[kind] for kind in self.search.kinds)
        yield from self._more((), free, (), self.total)

    def _more(
        self, chosen: tuple[tuple[int, int], ...], free: tuple[int, ...], blocks: Blocks, left: int
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        more = self.count - len(chosen) - 1
        if more < 0:
            if not left:
                yield chosen
            return
        for n in range(chosen[-1][0] if chosen else 0, len(self.lanes)):
            own, most = self.lanes[n]
            after = tuple(a - b for a, b in zip(free, self.sizes[n], strict=True))
            if min(after) < 0 or most + self.most(more, after) < left:
                continue
            together = tuple(sorted((*blocks, *own)))
            if not self.search.holds(together):
                continue
            for m in range(min(most, left - more), 0, -1):
                if self.most(more, after) < left - m:
                    break
                if not chosen or (n, -m) >= (chosen[-1][0], -chosen[-1][1]):
                    yield from self._more((*chosen, (n, m)), after, together, left - m)

    def _most(self, count: int, free: tuple[int, ...]) -> float:
        """Most micro-batches that so many lanes take on so many devices of each kind, nodes left aside."""
        if not count:
            return 0
        found = -inf
        for size, most in self.best.items():
            after = tuple(a - b for a, b in zip(free, size, strict=True))
            if min(after) >= 0:
                found = max(found, most + self.most(count - 1, after))
        return found


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
