"""What a block costs by itself: seconds and bytes that level 1 adds up thousands of times (paper A.1).

All numbers come from the cost model; here they are only asked for once each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from hetero_megatron.cluster import Link, model_of
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.footprint import Local
from hetero_megatron.planner.level_two import StageLoad
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.strategy import Recompute, Stage


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
    """A stage's place, as far as its costs depend on it.

    Attributes:
        multiple: of all tensor-parallel degrees of the pipeline, to which tokens are padded.
        replicas: copies of the model, over which ZeRO-1 cuts states.
        whole: no stage of the plan uses tensor parallelism.
    """

    block: Block
    first: bool
    last: bool
    multiple: int
    rows: int
    replicas: int
    zero: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Bytes:
    """A stage's memory as straight lines.

    Attributes:
        fixed, per_layer: whatever the schedule.
        kept, kept_per_layer, again_per_layer: of each micro-batch in flight; of a layer that is kept, or recomputed.
        boundary: of each activation or gradient that is sent or received.
    """

    fixed: int
    per_layer: int
    kept: int
    kept_per_layer: int
    again_per_layer: int
    boundary: int


class Prices:
    """Seconds and bytes of blocks under one problem and one cost model."""

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.costs = costs
        self._layers: dict[tuple[Block, int, str], Pair] = {}
        self._ends: dict[tuple[Block, int, bool], Pair] = {}
        self._travel: dict[tuple[Block, Block, int, bool], float] = {}
        self._loads: dict[tuple[Where, int, int, str], StageLoad] = {}
        self._bytes: dict[tuple[Where, str], Bytes] = {}
        self._cuts: dict[tuple[Block, bool, bool, int, bool], tuple[int, int]] = {}

    def learn(self, other: "Prices") -> None:
        """Take over what is known of blocks under the same model, on other devices of the same kinds."""
        self._layers.update(other._layers)
        self._ends.update(other._ends)
        self._travel.update(other._travel)
        self._loads.update(other._loads)
        self._bytes.update(other._bytes)
        self._cuts.update(other._cuts)

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
        """Seconds from one stage to the next, `near` where both are in one node; infinite where none could lie so."""
        key = (sender, receiver, rows, near)
        if key not in self._travel:
            pair = self._pair(sender, receiver, near)
            tokens = rows * self.problem.seq_length
            self._travel[key] = inf if pair is None else self.costs.boundary(*pair, tokens)
        return self._travel[key]

    def nearest(self, sender: Block, receiver: Block, rows: int) -> float:
        """The least that sending can take: in one node where one could hold both."""
        least = min(self.travel(sender, receiver, rows, near) for near in (True, False))
        return 0.0 if least == inf else least

    def load(self, where: Where, flight: int, moved: int, recompute: str) -> StageLoad:
        """What a stage there costs with so many micro-batches and boundary tensors held at a time.

        Layers are `recompute`d where memory asks for it, or never under `none`.
        """
        key = (where, flight, moved, recompute)
        if key not in self._loads:
            self._loads[key] = self._load(where, flight, moved, recompute)
        return self._loads[key]

    def _load(self, where: Where, flight: int, moved: int, recompute: str) -> StageLoad:
        block, rows = where.block, where.rows
        fixed = self.end(block, rows, False).total if where.first else 0.0
        fixed += self.end(block, rows, True).total if where.last else 0.0
        size = self.bytes(where, recompute)
        room = self.room(block.kind) - size.fixed - flight * size.kept - moved * size.boundary
        each = size.per_layer + flight * size.kept_per_layer
        if recompute == "none":
            return StageLoad(fixed, self.layer(block, rows).total, each, room)
        again = size.per_layer + flight * size.again_per_layer
        return StageLoad(
            fixed,
            self.layer(block, rows).total,
            each,
            room,
            self.layer(block, rows, recompute).total,
            again,
        )

    def room(self, kind: str) -> float:
        """Bytes of a device that a plan may fill."""
        device = next(each for each in self.problem.cluster.kinds if each.name == kind)
        return device.memory_bytes - self.costs.profiles.reserved(device)

    def bytes(self, where: Where, recompute: str) -> Bytes:
        """The cost model's account of stages with one and two layers, as lines: it is straight from there on."""
        key = (where, recompute)
        if key not in self._bytes:
            self._bytes[key] = self._lines(where, recompute)
        return self._bytes[key]

    def _lines(self, where: Where, recompute: str) -> Bytes:
        # Neither do states depend on tokens, nor activations on how states are cut.
        base = replace(where, replicas=1, zero=0, whole=False)
        if where != base:
            own = self.bytes(base, recompute)
            fixed, per_layer = self._cutting(where)
            return replace(own, fixed=own.fixed + fixed, per_layer=own.per_layer + per_layer)
        one, two = self._ask(where, 1, 0, recompute), self._ask(where, 2, 0, recompute)
        per_layer, kept_per_layer = two[0] - one[0], two[1] - one[1]
        fixed, kept, again_per_layer = one[0] - per_layer, one[1] - kept_per_layer, 0
        if recompute != "none":
            mixed, more = self._ask(where, 1, 1, recompute), self._ask(where, 1, 2, recompute)
            again_per_layer = more[1] - mixed[1]
            fixed = max(fixed, mixed[0] - 2 * per_layer)
            kept = max(kept, mixed[1] - kept_per_layer - again_per_layer)
        return Bytes(fixed, per_layer, kept, kept_per_layer, again_per_layer, one[2])

    def _cutting(self, where: Where) -> tuple[int, int]:
        """What cutting states over replicas changes: bytes, and bytes per layer."""
        cut = where.replicas if where.zero else 1
        key = (where.block, where.first, where.last, cut, where.whole)
        if key not in self._cuts:
            some = replace(where, rows=self.problem.rows[0], multiple=where.block.tp)
            changes = [
                self._ask(some, layers, 0, "none", cut, where.whole)[0]
                - self._ask(some, layers, 0, "none")[0]
                for layers in (1, 2)
            ]
            per_layer = changes[1] - changes[0]
            self._cuts[key] = changes[0] - per_layer, per_layer
        return self._cuts[key]

    def _ask(
        self, where: Where, kept: int, again: int, recompute: str, cut: int = 1, whole: bool = False
    ) -> tuple[int, int, int]:
        """The account of a stage of so many layers, the last `again` of them recomputed."""
        block = where.block
        share = -(-where.rows * self.problem.seq_length // block.cp)
        multiple = where.multiple if self.costs.sequence_parallel else 1
        local = Local(-(-share // multiple) * multiple, block.tp, model_of(block.kind) == "cpu", block.kind)
        entries = (Recompute(recompute, (kept, kept + again - 1)),) if again else ()
        stage = Stage((0,) * block.tp, (0, kept + again - 1), recompute=entries)
        return self.costs.footprint.stage(stage, local, cut, where.first, where.last, whole)

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
            for b in [a] if near else [n for n in nodes if n != a]:
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
    return tuple(prices.nearest(a, b, rows) for a, b in pairwise(blocks))
