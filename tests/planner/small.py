"""Small random planning problems, and the best strategy of each by plain enumeration."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.problem import Choices, Problem, allows
from hetero_megatron.strategy import Pipeline, Stage, Strategy

Seats = tuple[tuple[int, int], ...]
"""(node, devices) of each stage of a pipeline."""


def small_problem(seed: int) -> Problem:
    """Up to 8 devices of up to 2 kinds, up to 12 layers; devices differ in speed, memory and links."""
    draw = random.Random(seed)
    kinds = []
    for name in draw.sample(["h800", "h20", "a100-80", "v100-32"], draw.choice([1, 2, 2, 2])):
        flops = draw.choice([50e12, 150e12, 400e12, 1000e12])
        memory = draw.choice([40, 80, 200, 4000]) * 2**20
        kinds.append(DeviceKind(name, memory, flops, Link("nvlink", draw.choice([50.0, 400.0]))))
    budget = draw.choice([2, 3, 3, 4, 4, 4, 5, 5, 6, 8])
    devices: list[Device] = []
    node = 0
    while len(devices) < budget:
        size = min(draw.choice([1, 2, 3, 4, 4]), budget - len(devices))
        kind = kinds[node % len(kinds)]
        devices += [Device(len(devices) + n, kind.name, node) for n in range(size)]
        node += 1
    heads = draw.choice([2, 4, 4])
    config = LlamaConfig(
        num_layers=draw.randint(2, {5: 8, 6: 5, 8: 3}.get(budget, 12)),
        hidden_size=128 * draw.choice([1, 4, 8]),
        ffn_hidden_size=1024,
        num_attention_heads=heads,
        num_query_groups=draw.choice([1, heads]),
        vocab_size=512,
    )
    batch = draw.choice([2, 3, 4, 6, 8] if budget <= 4 else [2, 3, 4] if budget <= 6 else [2, 3])
    choices = Choices(
        micro_batch_sizes=draw.choice([(1,), (1, 2)]), zero=draw.choice([(0,), (1,), (0, 1)]), recompute=()
    )
    cluster = Cluster(tuple(devices), tuple(kinds), Link("ib", draw.choice([2.0, 50.0])))
    return Problem(config, cluster, batch, draw.choice([256, 1024]), choices)


def small_costs(problem: Problem) -> Costs:
    """The cost model of a small problem."""
    return Costs(problem.config, problem.cluster, seq_length=problem.seq_length)


class Enumeration:
    """Every strategy whose pipelines, each alone, take less than a limit: none other can take less than that.

    Devices of one node are alike; nodes are not told to be. Nothing of the planner is used but the cost model.
    """

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem, self.costs, self.limit, self.timed = problem, small_costs(problem), limit, 0
        self.nodes: dict[tuple[int, str], list[int]] = {}
        for device in problem.cluster.devices:
            self.nodes.setdefault((device.node, device.kind), []).append(device.rank)
        self.sites = list(self.nodes)
        self._alone: dict[tuple[Seats, int, int], list[tuple[int, ...]]] = {}

    def best(self) -> float:
        """Seconds of the fastest strategy that fits, or the limit."""
        found = self.limit
        batch = self.problem.global_batch_size
        for rows in self.problem.choices.micro_batch_sizes:
            if batch % rows == 0:
                for strategy in self._strategies(rows, batch // rows):
                    self.timed += 1
                    memory = self.costs.memory(strategy)
                    cluster = self.problem.cluster
                    if all(need <= cluster.kind(rank).memory_bytes for rank, need in memory.items()):
                        found = min(found, self.costs.step(strategy).seconds)
        return found

    def _strategies(self, rows: int, total: int) -> Iterator[Strategy]:
        free = tuple(len(ranks) for ranks in self.nodes.values())
        for pipelines in self._pipelines(rows, total, free, ((), 0)):
            for layers in self._products([self.alone(seats, m, rows) for seats, m in pipelines]):
                for zero in self.problem.choices.zero:
                    yield self._made(pipelines, layers, rows, zero)

    def _products(self, options: list[list[tuple[int, ...]]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not options:
            yield ()
            return
        for first in options[0]:
            for rest in self._products(options[1:]):
                yield (first, *rest)

    def _pipelines(
        self, rows: int, left: int, free: tuple[int, ...], least: tuple[Seats, int]
    ) -> Iterator[list[tuple[Seats, int]]]:
        """Pipelines with micro-batches, in ascending order, that use up all micro-batches."""
        if left == 0:
            yield []
            return
        for seats in self._seats(free):
            for m in range(1, left + 1):
                if (seats, m) < least or not self.alone(seats, m, rows):
                    continue
                after = list(free)
                for node, size in seats:
                    after[node] -= size
                for rest in self._pipelines(rows, left - m, tuple(after), (seats, m)):
                    yield [(seats, m), *rest]

    def _seats(self, free: tuple[int, ...], depth: int = 0) -> Iterator[Seats]:
        if depth == self.problem.config.num_layers:
            return
        for node, count in enumerate(free):
            for size in range(1, count + 1):
                if allows(self.problem.config, size) and self._degree(size, node):
                    after = (*free[:node], count - size, *free[node + 1 :])
                    yield ((node, size),)
                    for rest in self._seats(after, depth + 1):
                        yield ((node, size), *rest)

    def _degree(self, size: int, node: int) -> bool:
        """A power of two, or a divisor of some node."""
        del node
        return size & (size - 1) == 0 or any(len(ranks) % size == 0 for ranks in self.nodes.values())

    def alone(self, seats: Seats, m: int, rows: int) -> list[tuple[int, ...]]:
        """Splits of the layers with which this pipeline, alone, ends before the limit."""
        key = (seats, m, rows)
        if key not in self._alone:
            total, own = self.problem.config.num_layers, []
            each = [self._layer(node, size, rows) for node, size in seats]
            for cuts in combinations(range(1, total), len(seats) - 1):
                layers = tuple(b - a for a, b in pairwise((0, *cuts, total)))
                if max(n * seconds for n, seconds in zip(layers, each, strict=True)) * m >= self.limit:
                    continue
                strategy = self._made([(seats, m)], [layers], rows, 0)
                if max(self.costs.step(strategy).pipeline_seconds) < self.limit:
                    own.append(layers)
            self._alone[key] = own
        return self._alone[key]

    def _layer(self, node: int, size: int, rows: int) -> float:
        kind = self.problem.cluster.kind(self.nodes[self.sites[node]][0])
        lengths = (self.problem.seq_length,) * rows
        return self.costs.layer(kind.name, size, 1, kind.link, lengths).total

    def _made(self, pipelines, layers, rows: int, zero: int) -> Strategy:  # type: ignore[no-untyped-def]
        used = [0] * len(self.sites)
        made = []
        for (seats, m), own in zip(pipelines, layers, strict=True):
            stages, first = [], 0
            for (node, size), count in zip(seats, own, strict=True):
                ranks = self.nodes[self.sites[node]][used[node] : used[node] + size]
                used[node] += size
                stages.append(Stage(tuple(ranks), (first, first + count - 1), size))
                first += count
            made.append(Pipeline(m, rows, tuple(stages)))
        return Strategy(tuple(made), zero if len(made) > 1 else 0)
