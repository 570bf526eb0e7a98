"""The fastest strategy of a small problem by enumeration, with nothing of the planner but its cost model.

Every pipeline (a sequence of stages, each of one kind and tensor-parallel degree inside a node or on whole nodes), every
split of the layers, every number of micro-batches, every set of pipelines, every placement, each micro-batch size and
ZeRO choice. What is left out cannot be faster than the limit or has not the memory:

- by itself, with all devices of a kind as near as in one node, a pipeline already takes the limit (1F1B recursion on all
  splits at once), or some stage has not the memory at this number of micro-batches and replicas;
- the devices that are left cannot take the micro-batches that are left, by dynamic programming over devices of each kind;
- the whole strategy, timed on a cluster where all devices of a kind are in one node, takes the limit.

Nodes of a kind that are as large, and empty yet, are alike: one of them stands for all.
"""

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.problem import Problem, allows
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.recursion import order_of
from hetero_megatron.strategy import Pipeline, Stage, Strategy

Seat = tuple[str, int]
"""Kind and tensor-parallel degree of a stage."""
Lane = tuple[Seat, ...]
Floats = NDArray[np.float64]


class Enumeration:
    """All strategies of a problem that take less than a limit."""

    def __init__(self, problem: Problem, limit: float = inf) -> None:
        assert problem.parts == (1,), "context parallelism is not enumerated"
        assert not problem.choices.recompute, "recomputation is not enumerated"
        self.problem, self.limit = problem, limit
        self.costs = Costs(problem.config, problem.cluster, seq_length=problem.seq_length)
        self.layers = problem.config.num_layers
        self.nodes: dict[tuple[str, int], tuple[int, ...]] = {}
        for device in problem.cluster.devices:
            site = (device.kind, device.node)
            self.nodes[site] = (*self.nodes.get(site, ()), device.rank)
        self.kinds = sorted({kind for kind, _ in self.nodes})
        self.count = {
            kind: sum(len(own) for (k, _), own in self.nodes.items() if k == kind) for kind in self.kinds
        }
        self.near = self._near()
        self.is_near = all(sum(k == kind for k, _ in self.nodes) == 1 for kind in self.kinds)
        self.ideal = Costs(problem.config, self.near, seq_length=problem.seq_length)
        self.ranks = {
            kind: tuple(device.rank for device in self.near.devices if device.kind == kind)
            for kind in self.kinds
        }
        self.priced = self.timed = 0

    def _near(self) -> Cluster:
        """The cluster with all devices of a kind in one node, on the better of its own link and that between nodes."""
        cluster = self.problem.cluster
        assert not cluster.between

        def better(link: Link) -> Link:
            rate = max(map(bytes_per_second, (link, cluster.inter_node)))
            latency = min(link.latency_s, cluster.inter_node.latency_s)
            if rate == bytes_per_second(link) and latency == link.latency_s:
                return link
            return Link("better", rate / 1e9 / 0.8, latency)

        kinds = tuple(
            DeviceKind(each.name, each.memory_bytes, each.flops, better(each.link)) for each in cluster.kinds
        )
        devices = tuple(Device(each.rank, each.kind, self.kinds.index(each.kind)) for each in cluster.devices)
        return Cluster(devices, kinds, cluster.inter_node)

    def best(self, first: bool = False) -> float:
        """Seconds of the fastest strategy within the limit, infinite where there is none; or of any, with `first`."""
        found = inf
        for rows, zero, pipelines in self._settings():
            for strategy in self._strategies(rows, zero, pipelines):
                self.priced += 1
                if self.ideal.step(strategy[0]).seconds >= min(self.limit, found):
                    continue
                for placed in self._placed(*strategy[1:], rows, zero):
                    self.timed += 1
                    memory = self.costs.memory(placed)
                    if any(
                        need > self.problem.cluster.kind(rank).memory_bytes for rank, need in memory.items()
                    ):
                        continue
                    found = min(found, self.costs.step(placed).seconds)
                    if first:
                        return found
        return found if found < self.limit else inf

    def _settings(self) -> Iterator[tuple[int, int, int]]:
        batch, choices = self.problem.global_batch_size, self.problem.choices
        for rows in choices.micro_batch_sizes:
            if batch % rows == 0:
                for pipelines in range(1, min(batch // rows, len(self.problem.cluster.devices)) + 1):
                    for zero in dict.fromkeys(each if pipelines > 1 else 0 for each in choices.zero):
                        yield rows, zero, pipelines

    # Lanes

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Every sequence of stages that there are devices for."""
        sizes = {len(own) for own in self.nodes.values()}
        degrees = [
            n
            for n in range(1, 2 * max(sizes) + 1)
            if allows(self.problem.config, n) and (n & (n - 1) == 0 or any(size % n == 0 for size in sizes))
        ]
        seats = [(kind, n) for kind in self.kinds for n in degrees if self.holds(((kind, n),))]
        found: list[Lane] = []

        def longer(lane: Lane) -> None:
            for seat in seats:
                longest = (*lane, seat)
                if len(longest) <= self.layers and self.holds(tuple(sorted(longest))):
                    found.append(longest)
                    longer(longest)

        longer(())
        return tuple(found)

    @cache  # noqa: B019  # lives as long as one problem
    def holds(self, seats: Lane) -> bool:
        """Whether there are devices for these stages, in nodes."""
        return next(self._seated(seats), None) is not None

    def _seated(self, seats: Sequence[Seat]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Ranks of each stage, in every way that differs."""
        largest = {
            kind: max(len(own) for (k, _), own in self.nodes.items() if k == kind) for kind in self.kinds
        }
        order = sorted(range(len(seats)), key=lambda n: -seats[n][1])

        def place(
            n: int, free: dict[tuple[str, int], tuple[int, ...]], found: dict[int, tuple[int, ...]]
        ) -> Iterator[tuple[tuple[int, ...], ...]]:
            if n == len(order):
                yield tuple(found[s] for s in range(len(seats)))
                return
            kind, degree = seats[order[n]]
            if degree > largest[kind]:
                whole = [
                    site
                    for site, own in free.items()
                    if site[0] == kind and len(own) == len(self.nodes[site]) == largest[kind]
                ]
                needed = degree // largest[kind]
                if degree % largest[kind] == 0 and len(whole) >= needed:
                    ranks = tuple(rank for site in whole[:needed] for rank in free[site])
                    left = {site: () if site in whole[:needed] else own for site, own in free.items()}
                    yield from place(n + 1, left, {**found, order[n]: ranks})
                return
            tried = set()
            for site, own in free.items():
                if site[0] != kind or len(own) < degree:
                    continue
                empty = len(own) == len(self.nodes[site])
                if empty and len(own) in tried:
                    continue
                tried |= {len(own)} if empty else set()
                yield from place(n + 1, {**free, site: own[degree:]}, {**found, order[n]: own[:degree]})

        yield from place(0, self.nodes, {})

    # Splits of one lane, all at once

    @cache  # noqa: B019
    def _splits(self, depth: int) -> NDArray[np.int64]:
        cuts = combinations(range(1, self.layers), depth - 1)
        return np.array([[b - a for a, b in pairwise((0, *own, self.layers))] for own in cuts])

    @cache  # noqa: B019
    def _unit(self, seat: Seat, rows: int, unit: str) -> tuple[float, float]:
        kind, degree = seat
        lengths = (self.problem.seq_length,) * rows
        if unit == "layer":
            link = next(each.link for each in self.near.kinds if each.name == kind)
            one = self.ideal.layer(kind, degree, 1, link, lengths)
        else:
            one = getattr(self.ideal, unit)(kind, degree, 1, lengths)
        return one.forward, one.backward

    @cache  # noqa: B019
    def _travel(self, sender: Seat, receiver: Seat, rows: int) -> float:
        first, second = self._imagined((sender, receiver), (1, 1))
        return self.ideal.boundary(first, second, rows * self.problem.seq_length)

    def _imagined(self, lane: Sequence[Seat], layers: Sequence[int]) -> tuple[Stage, ...]:
        """The stages with ranks of the ideal cluster, in order."""
        used = dict.fromkeys(self.kinds, 0)
        stages = []
        for (kind, degree), (first, end) in zip(lane, pairwise(accumulate(layers, initial=0)), strict=True):
            own = self.ranks[kind][used[kind] : used[kind] + degree]
            used[kind] += degree
            stages.append(Stage(own, (first, end - 1), degree))
        return tuple(stages)

    def _within(
        self, lane: Lane, m: int, rows: int, zero: int, pipelines: int
    ) -> tuple[tuple[int, ...], ...]:
        """Splits with which a pipeline takes less than the limit by itself and has the memory, fastest first."""
        splits = self._splits(len(lane))
        if self.limit < inf:
            speed = sum(1 / sum(self._unit(seat, rows, "layer")) for seat in lane)
            if m * self.layers / speed >= self.limit:
                return ()
        passes = []
        for n in (0, 1):
            own = splits * np.array([self._unit(seat, rows, "layer")[n] for seat in lane])
            own[:, 0] += self._unit(lane[0], rows, "embedding")[n]
            own[:, -1] += self._unit(lane[-1], rows, "head")[n]
            passes.append(own)
        keep = (m * (passes[0] + passes[1])).max(axis=1) < self.limit
        if keep.any():
            keep &= (splits <= np.array(self._most(lane, m, rows, zero, pipelines))).all(axis=1)
        splits, passes = splits[keep], [own[keep] for own in passes]
        if not len(splits):
            return ()
        seconds = self._alone(lane, m, rows, *passes)
        seconds = self._with_tail(seconds, passes[1], lane, splits, zero, pipelines)
        order = np.argsort(seconds, kind="stable")
        return tuple(tuple(int(n) for n in splits[k]) for k in order if seconds[k] < self.limit)

    def _alone(self, lane: Lane, m: int, rows: int, forward: Floats, backward: Floats) -> Floats:
        """When every stage ends its last backward, for all splits: the recursion of the cost model, on columns."""
        order = order_of("1f1b", len(lane), m)
        travel = [self._travel(lane[min(pair)], lane[max(pair)], rows) for pair in order.boundaries]
        ends: list[Floats | float] = [0.0] * (len(order.entries) + 1)
        for number, (before, need, slot, boundary, _) in enumerate(order.entries):
            start = ends[before] if before >= 0 else 0.0
            arrived = ends[need]
            if boundary >= 0:
                arrived = np.maximum(start, arrived) + travel[boundary]
            stage, kind, _ = order.slots[slot]
            ends[number] = np.maximum(start, arrived) + (forward if kind == "F" else backward)[:, stage]
        return np.stack([np.broadcast_to(ends[number], len(forward)) for number in order.last], axis=1)

    def _with_tail(
        self, ends: Floats, backward: Floats, lane: Lane, splits: NDArray[np.int64], zero: int, pipelines: int
    ) -> Floats:
        """At least so long until gradients are reduced and the slowest update is done."""
        costs, work = self.ideal, self.ideal.work
        updates = np.zeros(len(splits))
        for s, (kind, degree) in enumerate(lane):
            first, last = s == 0, s == len(lane) - 1
            elements = np.array(
                [
                    costs.footprint.elements(n, degree, pipelines if zero else 1, first, last, False)[1]
                    for n in range(self.layers + 1)
                ]
            )[splits[:, s]]
            device = next(each for each in self.near.kinds if each.name == kind)
            updates = np.maximum(updates, work.update_seconds(device, 1.0) * elements)
            if pipelines > 1:
                own = (first + last) * work.table + splits[:, s] * work.layer_parameters
                how = "reduce_scatter" if zero else "all_reduce"
                unit = costs.profiles.transfer_seconds(device.link, how, pipelines, 1e9) - (
                    costs.profiles.transfer_seconds(device.link, how, pipelines, 1e-9)
                )
                ends[:, s] = np.maximum(
                    ends[:, s], ends[:, s] - backward[:, s] + 4 * own / degree * unit / 1e9
                )
        ranks = sum(degree for _, degree in lane) + pipelines - 1
        latency = min(link.latency_s for link in (self.near.inter_node, *(k.link for k in self.near.kinds)))
        agree = 4 * np.log2(ranks) * latency if ranks > 1 else 0.0
        return (ends.max(axis=1) + updates + agree) * (1 - 1e-12)

    @cache  # noqa: B019
    def _most(self, lane: Lane, m: int, rows: int, zero: int, pipelines: int) -> tuple[int, ...]:
        """Most layers of each stage that its memory takes, whatever the others have."""
        most = [0] * len(lane)
        # ZeRO-1 cuts rows where no stage of a strategy has tensor parallelism, else columns: whichever is less.
        rank = self.near.ranks[0]
        beside: list[tuple[Pipeline, ...]] = [()]
        if zero and all(degree == 1 for _, degree in lane):
            beside.append((Pipeline(1, rows, (Stage((rank, rank), (0, 0), 2),)),))
        for n in range(1, self.layers - len(lane) + 2):
            own = Pipeline(m, rows, self._imagined(lane, [n] * len(lane)))
            needs = [self.ideal.memory(Strategy((*other, own), zero), pipelines) for other in beside]
            for s, stage in enumerate(own.stages):
                need = min(each[stage.ranks[0]] for each in needs)
                if most[s] == n - 1 and need <= self.near.kind(stage.ranks[0]).memory_bytes:
                    most[s] = n
            if max(most) < n:
                break
        return tuple(most)

    # Sets of lanes

    def _strategies(
        self, rows: int, zero: int, pipelines: int
    ) -> Iterator[tuple[Strategy, tuple[Lane, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """(on the ideal cluster, lanes, micro-batches, layers) of every set of lanes that is within the limit."""
        total = self.problem.global_batch_size // rows
        within: list[tuple[Lane, list[tuple[tuple[int, ...], ...]]]] = []
        for lane in self.lanes:
            own = []
            for m in range(1, total - pipelines + 2):
                splits = self._within(lane, m, rows, zero, pipelines)
                if not splits:
                    break  # more micro-batches take longer and need no less memory
                own.append(splits)
            if own:
                within.append((lane, own))
        sizes = [tuple(sum(n for k, n in lane if k == kind) for kind in self.kinds) for lane, _ in within]
        most = self._most_micro_batches(
            [(size, len(own)) for size, (_, own) in zip(sizes, within, strict=True)], pipelines
        )
        chosen: list[tuple[int, int]] = []

        def choose(start: int, free: tuple[int, ...], left: int) -> Iterator[tuple[tuple[int, int], ...]]:
            more = pipelines - len(chosen)
            if not more:
                if not left:
                    yield tuple(chosen)
                return
            for n in range(start, len(within)):
                after = tuple(a - b for a, b in zip(free, sizes[n], strict=True))
                if min(after) < 0:
                    continue
                for m in range(1, min(len(within[n][1]), left - more + 1) + 1):
                    if most(more - 1, after) < left - m or (chosen and (n, m) < chosen[-1]):
                        continue
                    chosen.append((n, m))
                    yield from choose(n, after, left - m)
                    chosen.pop()

        for found in choose(0, tuple(self.count[kind] for kind in self.kinds), total):
            lanes = tuple(within[n][0] for n, _ in found)
            if not self.holds(tuple(sorted(seat for lane in lanes for seat in lane))):
                continue
            counts = tuple(m for _, m in found)
            options = [within[n][1][m - 1] for n, m in found]
            for layers in product(*options):
                if any(a == b and x > y for (a, x), (b, y) in pairwise(zip(found, layers, strict=True))):
                    continue  # equal lanes in one order
                ranks = self._in_order([seat for lane in lanes for seat in lane])
                yield self._made(lanes, counts, layers, ranks, rows, zero), lanes, counts, layers

    def _most_micro_batches(self, items: Sequence[tuple[tuple[int, ...], int]], pipelines: int):  # type: ignore[no-untyped-def]
        """f(number of lanes, free devices of each kind): most micro-batches that they could take."""
        best: dict[tuple[int, ...], int] = {}
        for size, count in items:
            best[size] = max(best.get(size, 0), count)

        @cache
        def most(lanes: int, free: tuple[int, ...]) -> float:
            if not lanes:
                return 0
            found = -inf
            for size, count in best.items():
                after = tuple(a - b for a, b in zip(free, size, strict=True))
                if min(after) >= 0:
                    found = max(found, count + most(lanes - 1, after))
            return found

        del pipelines
        return most

    def _in_order(self, seats: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
        used = dict.fromkeys(self.kinds, 0)
        found = []
        for kind, degree in seats:
            found.append(self.ranks[kind][used[kind] : used[kind] + degree])
            used[kind] += degree
        return tuple(found)

    def _placed(
        self,
        lanes: tuple[Lane, ...],
        counts: tuple[int, ...],
        layers: tuple[tuple[int, ...], ...],
        rows: int,
        zero: int,
    ) -> Iterator[Strategy]:
        for ranks in self._seated([seat for lane in lanes for seat in lane]):
            yield self._made(lanes, counts, layers, ranks, rows, zero)

    @staticmethod
    def _made(
        lanes: tuple[Lane, ...],
        counts: tuple[int, ...],
        layers: tuple[tuple[int, ...], ...],
        ranks: tuple[tuple[int, ...], ...],
        rows: int,
        zero: int,
    ) -> Strategy:
        pipelines, left = [], iter(ranks)
        for lane, count, own in zip(lanes, counts, layers, strict=True):
            ends = pairwise(accumulate(own, initial=0))
            stages = tuple(
                Stage(next(left), (first, end - 1), degree)
                for (_, degree), (first, end) in zip(lane, ends, strict=True)
            )
            pipelines.append(Pipeline(count, rows, stages))
        return Strategy(tuple(pipelines), zero)
