"""What a block costs by itself: seconds and bytes that level 1 adds up thousands of times (paper A.1).

All numbers come from the cost model; here they are only asked for once each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Link
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.level_two import StageLoad
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Where:
    """A stage's place, as far as its memory depends on it.

    Attributes:
        place, depth: of the pipeline, stages counted from 0.
        widest: the largest tensor-parallel degree of the pipeline, to whose multiple tokens are padded.
        micro_batches: of the pipeline.
        replicas: copies of the model, over which ZeRO-1 cuts states.
    """

    block: Block
    place: int
    depth: int
    widest: int
    rows: int
    micro_batches: int
    replicas: int
    zero: int

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return self.place == 0

    @property
    def last(self) -> bool:
        """Whether it holds the head."""
        return self.place == self.depth - 1


class _Sample:
    """Strategies with a few layers at one place, made for the memory account only: ranks stand for kinds."""

    def __init__(self, prices: "Prices", where: Where) -> None:
        self._prices, self._where = prices, where
        self._ranks = prices.some_ranks(where.block)

    def bytes(self, kept: int, again: int, recompute: str) -> int:
        where = self._where
        layers = (where.place, where.place + kept + again - 1)
        entries = (Recompute(recompute, (layers[0] + kept, layers[1])),) if again else ()
        block, ranks = where.block, self._ranks
        own = Stage(ranks, layers, block.tp, block.cp, entries)
        # Fillers keep the depth, the parts and the padding; their own bytes are not looked at.
        spare = self._prices.rank_outside(ranks)
        filler = Stage((spare,) * (where.widest * block.cp), (0, 0), where.widest, block.cp)
        stages = tuple(own if place == where.place else filler for place in range(where.depth))
        pipelines = [Pipeline(where.micro_batches, where.rows, stages)]
        others = where.replicas - block.cp
        if others > 0:
            other = Stage((spare,) * others, (0, 0), 1, others)
            pipelines.append(Pipeline(1, 1, (other,)))
        return self._prices.costs.memory(Strategy(tuple(pipelines), where.zero))[ranks[0]]


class Prices:
    """Seconds and bytes of blocks under one problem and one cost model."""

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.costs = costs
        self._layers: dict[tuple[Block, int, str], Pair] = {}
        self._ends: dict[tuple[Block, int, bool], Pair] = {}
        self._travel: dict[tuple[Block, Block, int, bool], float] = {}
        self._loads: dict[tuple[Where, str], StageLoad] = {}
        self._samples: dict[Where, _Sample] = {}

    def lengths(self, rows: int) -> tuple[int, ...]:
        """Documents of a micro-batch: rows that are full."""
        return (self.problem.seq_length,) * rows

    def link(self, block: Block) -> Link:
        """What a block's own collectives run on."""
        cluster = self.problem.cluster
        if block.spread:
            return cluster.inter_node
        return next(kind.link for kind in cluster.kinds if kind.name == block.kind)

    def layer(self, block: Block, rows: int, recompute: str = "none") -> Pair:
        """One layer on one micro-batch."""
        key = (block, rows, recompute)
        if key not in self._layers:
            seconds = self.costs.layer(
                block.kind, block.tp, block.cp, self.link(block), self.lengths(rows), recompute
            )
            self._layers[key] = Pair(seconds.forward, seconds.backward)
        return self._layers[key]

    def end(self, block: Block, rows: int, last: bool) -> Pair:
        """The embedding, or the head with the loss."""
        key = (block, rows, last)
        if key not in self._ends:
            ask = self.costs.head if last else self.costs.embedding
            seconds = ask(block.kind, block.tp, block.cp, self.lengths(rows))
            self._ends[key] = Pair(seconds.forward, seconds.backward)
        return self._ends[key]

    def travel(self, sender: Block, receiver: Block, rows: int, near: bool) -> float:
        """Seconds from one stage to the next; `near` where both are in one node."""
        key = (sender, receiver, rows, near)
        if key not in self._travel:
            pair = self._pair(sender, receiver, near)
            self._travel[key] = (
                self.travel(sender, receiver, rows, False)
                if pair is None
                else self.costs.boundary(*pair, rows * self.problem.seq_length)
            )
        return self._travel[key]

    def nearest(self, sender: Block, receiver: Block, rows: int) -> float:
        """The least that sending can take: in one node where one could hold both."""
        return min(self.travel(sender, receiver, rows, near) for near in (True, False))

    def load(self, where: "Where", recompute: str) -> StageLoad:
        """What a stage there costs, `recompute`d where memory asks for it, or `none`.

        Bytes come from the cost model's own account of stages with few layers: it is linear in layers, but for the
        first kept and the first recomputed one.
        """
        key = (where, recompute)
        if key not in self._loads:
            self._loads[key] = self._load(where, recompute)
        return self._loads[key]

    def _load(self, where: "Where", recompute: str) -> StageLoad:
        block, rows = where.block, where.rows
        fixed = self.end(block, rows, False).total if where.first else 0.0
        fixed += self.end(block, rows, True).total if where.last else 0.0
        # Kept layers and recomputed layers of the samples, and the bytes of each.
        kept = self._bytes(where, 1, 0, "none")
        each = self._bytes(where, 2, 0, "none") - kept
        room = self.room(block.kind)
        if recompute == "none":
            return StageLoad(fixed, self.layer(block, rows).total, each, room - (kept - each))
        mixed = self._bytes(where, 1, 1, recompute)
        again = self._bytes(where, 1, 2, recompute) - mixed
        return StageLoad(
            fixed,
            self.layer(block, rows).total,
            each,
            room - (mixed - each - again),
            self.layer(block, rows, recompute).total,
            again,
        )

    def room(self, kind: str) -> float:
        """Bytes of a device that a plan may fill."""
        return next(each.memory_bytes for each in self.problem.cluster.kinds if each.name == kind)

    def _bytes(self, where: "Where", kept: int, again: int, recompute: str) -> float:
        """What the cost model says of so few layers at this place of a pipeline."""
        if where not in self._samples:
            self._samples[where] = _Sample(self, where)
        return self._samples[where].bytes(kept, again, recompute)

    def rank_outside(self, ranks: Sequence[int]) -> int:
        """Some other rank; a stage that has all ranks is alone, and nobody asks."""
        return next((rank for rank in self.problem.cluster.ranks if rank not in ranks), ranks[0])

    def some_ranks(self, block: Block) -> tuple[int, ...]:
        """Ranks that a block could have."""
        own = [device for device in self.problem.cluster.devices if device.kind == block.kind]
        for node in dict.fromkeys(device.node for device in own):
            ranks = tuple(device.rank for device in own if device.node == node)
            if len(ranks) >= block.ranks:
                return ranks[: block.ranks]
        return tuple(device.rank for device in own)[: block.ranks]

    def _pair(self, sender: Block, receiver: Block, near: bool) -> tuple[Stage, Stage] | None:
        """Stages with ranks that lie as asked for, if the cluster has any."""
        by_site: dict[tuple[str, int], list[int]] = {}
        for device in self.problem.cluster.devices:
            by_site.setdefault((device.kind, device.node), []).append(device.rank)
        nodes = sorted({node for _, node in by_site})

        def ranks(block: Block, node: int, skip: int = 0) -> tuple[int, ...]:
            if block.spread:
                own = [r for (kind, n), site in sorted(by_site.items()) if kind == block.kind for r in site]
                return tuple(own[: block.ranks])
            return tuple(by_site.get((block.kind, node), ())[skip : skip + block.ranks])

        for a in nodes:
            for b in [a] if near else [n for n in nodes if n != a] or [a]:
                first = ranks(sender, a)
                second = ranks(receiver, b, len(first) if near and sender.kind == receiver.kind else 0)
                if len(first) == sender.ranks and len(second) == receiver.ranks:
                    return (
                        Stage(first, (0, 0), sender.tp, sender.cp),
                        Stage(second, (1, 1), receiver.tp, receiver.cp),
                    )
        return None


def travels(prices: Prices, blocks: Sequence[Block], rows: int) -> tuple[float, ...]:
    """Seconds over each boundary of a pipeline, at their least."""
    return tuple(prices.nearest(a, b, rows) for a, b in zip(blocks, blocks[1:], strict=False))
