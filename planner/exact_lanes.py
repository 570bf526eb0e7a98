"""All splits of one lane's layers at once, and the least that a step with such a lane takes (paper A.1).

Bounds for the exhaustive search: what they leave out is slower than the limit wherever its stages are placed and whatever
the other lanes are.
"""

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import log2

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.planner.lanes import Blocks, Lane, Lanes, Setting
from hetero_megatron.planner.level_two import PipelineLoad
from hetero_megatron.planner.prices import Prices, travels
from hetero_megatron.planner.profiles import Operation
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.recursion import order_of

FP32 = 4
ROUNDING = 1 - 1e-12

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """A lane with one split of its layers, and the least seconds of a step with it."""

    lane: Lane
    seconds: float


class LaneSplits:
    """Splits of lanes within a limit, under one problem."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.lanes = prices, Lanes(prices, quick=False)
        self.total = prices.problem.config.num_layers
        self._splits: dict[int, Counts] = {}
        self._links = {
            kind.name: _fastest(prices.problem.cluster, kind) for kind in prices.problem.cluster.kinds
        }

    def within(self, blocks: Blocks, setting: Setting, micro_batches: int, limit: float) -> list[Split]:
        """Splits that take less than the limit and have the memory, fastest first.

        Every split of the layers, without recomputation where that fits, else with each kind of it for as few layers as
        memory asks for.
        """
        speed = sum(1 / self.prices.layer(block, setting.rows).total for block in blocks)
        if micro_batches * self.total / speed >= limit or len(blocks) > self.total:
            return []
        splits, found = self._all(len(blocks)), []
        fits: NDArray[np.bool_] = np.zeros(len(splits), dtype=bool)
        for recompute in ("none", *self.prices.problem.choices.recompute):
            loads = self.lanes.loads(blocks, setting, micro_batches, recompute)
            most = np.array([load.most(self.total) for load in loads])
            kept: NDArray[np.bool_] = np.all(splits <= most, axis=1)
            if recompute == "none":
                fits, chosen = kept, splits[kept]
            else:
                chosen = splits[kept & ~fits]
            if not len(chosen):
                continue
            again = np.array([[load.recomputed(n) for n in range(self.total + 1)] for load in loads])
            over = np.stack([again[s][chosen[:, s]] for s in range(len(blocks))], axis=1)
            forward, backward = self._passes(blocks, setting.rows, chosen, over, recompute)
            near = (micro_batches * (forward + backward)).max(axis=1) < limit
            if not near.any():
                continue
            chosen, over, forward, backward = chosen[near], over[near], forward[near], backward[near]
            ends = self._ends(blocks, setting.rows, micro_batches, forward, backward)
            least = self._with_tail(ends, backward, blocks, setting, chosen)
            for k in np.flatnonzero(least < limit):
                load = PipelineLoad(float(ends[k].max()), float((forward + backward)[k].max()))
                layers, extra = (tuple(int(n) for n in own[k]) for own in (chosen, over))
                found.append(
                    Split(Lane(blocks, setting.rows, layers, recompute, extra, load), float(least[k]))
                )
        return sorted(found, key=lambda each: (each.seconds, each.lane.layers))

    def _all(self, depth: int) -> Counts:
        if depth not in self._splits:
            cuts = combinations(range(1, self.total), depth - 1)
            self._splits[depth] = np.array(
                [[b - a for a, b in pairwise((0, *own, self.total))] for own in cuts], dtype=np.int64
            )
        return self._splits[depth]

    def _passes(
        self, blocks: Blocks, rows: int, layers: Counts, again: Counts, recompute: str
    ) -> tuple[Floats, Floats]:
        """Forward and backward seconds of one micro-batch, per split and stage."""
        found = []
        for phase in ("forward", "backward"):
            plain = np.array([getattr(self.prices.layer(block, rows), phase) for block in blocks])
            twice = np.array([getattr(self.prices.layer(block, rows, recompute), phase) for block in blocks])
            seconds = (layers - again) * plain + again * twice
            seconds[:, 0] += getattr(self.prices.end(blocks[0], rows, False), phase)
            seconds[:, -1] += getattr(self.prices.end(blocks[-1], rows, True), phase)
            found.append(seconds)
        return found[0], found[1]

    def _ends(
        self, blocks: Blocks, rows: int, micro_batches: int, forward: Floats, backward: Floats
    ) -> Floats:
        """When every stage's last backward ends under 1F1B, neighbours as near as they can be: `Order.run` on columns."""
        order = order_of("1f1b", len(blocks), micro_batches)
        between = travels(self.prices, blocks, rows)
        zero = np.zeros(len(forward))
        ends = [zero] * (len(order.entries) + 1)
        seconds = {"F": forward, "B": backward}
        for number, (before, need, slot, boundary, _) in enumerate(order.entries):
            start = ends[before] if before >= 0 else zero
            arrived = ends[need]
            if boundary >= 0:
                arrived = np.maximum(start, arrived) + between[min(order.boundaries[boundary])]
            stage, kind, _ = order.slots[slot]
            ends[number] = np.maximum(start, arrived) + seconds[kind][:, stage]
        return np.stack([ends[number] for number in order.last], axis=1)

    def _with_tail(
        self, ends: Floats, backward: Floats, blocks: Blocks, setting: Setting, layers: Counts
    ) -> Floats:
        """The least seconds of a step: gradients of a stage one after the other, none before its last backward pass; the
        slowest update; and that ranks agree."""
        costs, config = self.prices.costs, self.prices.problem.config
        work, cut = costs.work, setting.replicas if setting.zero else 1
        how: Operation = "reduce_scatter" if setting.zero else "all_reduce"
        synced, updates = ends.copy(), np.zeros(len(ends))
        for s, block in enumerate(blocks):
            first, last = s == 0, s == len(blocks) - 1
            counts = range(self.total + 1)
            elements = [costs.footprint.elements(n, block.tp, cut, first, last, False)[1] for n in counts]
            update = np.array([costs.update_seconds(block.kind, each) for each in elements])
            updates = np.maximum(updates, update[layers[:, s]])
            if setting.replicas > 1:
                tables = 0 if config.tie_word_embeddings else (first + last) * work.table
                sizes = [FP32 * (tables + n * work.layer_parameters) / block.tp for n in counts]
                reduce = np.array(
                    [
                        min(
                            costs.profiles.transfer_seconds(link, how, setting.replicas, size)
                            for link in self._links[block.kind]
                        )
                        for size in sizes
                    ]
                )
                synced[:, s] = np.maximum(ends[:, s], ends[:, s] - backward[:, s] + reduce[layers[:, s]])
        least: Floats = (synced.max(axis=1) + updates + self._agreed(blocks, setting)) * ROUNDING
        return least

    def _agreed(self, blocks: Blocks, setting: Setting) -> float:
        """The least that `Costs.fixed` says of any strategy with this lane."""
        profiles = self.prices.costs.profiles
        known = max(profiles.fixed_seconds.get(block.kind, 0.0) for block in blocks)
        ranks = sum(block.ranks for block in blocks) + setting.replicas // blocks[0].cp - 1
        if profiles.transfers or ranks < 2:
            return known
        latency = min(link.latency_s for own in self._links.values() for link in own)
        return known + 4 * log2(ranks) * latency


def near_cluster(cluster: Cluster) -> Cluster | None:
    """The cluster with all devices of a kind in one node, where no strategy takes longer; None if links are shared."""
    kinds = []
    for kind in cluster.kinds:
        own = _fastest(cluster, kind)[:2]
        if any(link.shared for link in _fastest(cluster, kind)):
            return None
        rate, latency = max(map(bytes_per_second, own)), min(link.latency_s for link in own)
        link = own[0]
        if (bytes_per_second(link), link.latency_s) != (rate, latency):
            link = Link("nearest", rate / bytes_per_second(Link("nearest", 1.0)), latency)
        kinds.append(DeviceKind(kind.name, kind.memory_bytes, kind.flops, link))
    names = [kind.name for kind in kinds]
    devices = tuple(Device(each.rank, each.kind, names.index(each.kind)) for each in cluster.devices)
    return Cluster(devices, tuple(kinds), cluster.inter_node, cluster.between)


def _fastest(cluster: Cluster, kind: DeviceKind) -> list[Link]:
    """Links that a device of a kind may have: its own, between nodes of its kind, and to other kinds."""
    between = {frozenset(pair[:2]): pair[2] for pair in cluster.between}
    others = [between.get(frozenset((kind.name, other.name)), cluster.inter_node) for other in cluster.kinds]
    own = between.get(frozenset((kind.name,)), cluster.inter_node)
    return [kind.link, own, *others]


__all__ = ["LaneSplits", "Split", "near_cluster"]
