"""The best pipeline of given blocks: layers, recomputation, and seconds by number of micro-batches (paper A.1).

A lane is a pipeline before its stages have ranks. Lanes of the same blocks are the same lane, so each is worked out once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from hetero_megatron.memory import SENDING_PER_STAGE
from hetero_megatron.planner.level_two import (
    PipelineLoad,
    StageLoad,
    closed_form,
    split_layers,
    without_limits,
)
from hetero_megatron.planner.prices import Prices, Where, travels
from hetero_megatron.planner.problem import Block
from hetero_megatron.planner.recursion import order_of

Blocks = tuple[Block, ...]
PERIODS = 4
"""Beyond this many times its depth, a pipeline's seconds grow by its slowest stage's with every micro-batch."""
QUICK_PERIODS = 2
NEAR = 1.005
"""A quick search does not look for recomputation that could gain less than this."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A pipeline's blocks, layers and seconds.

    Attributes:
        again: how many of a stage's layers are recomputed.
        load: seconds by number of micro-batches, exact at the number it was made for.
    """

    blocks: Blocks
    rows: int
    layers: tuple[int, ...]
    recompute: str
    again: tuple[int, ...]
    load: PipelineLoad


@dataclass(frozen=True, slots=True)
class Setting:
    """What all lanes of a plan share.

    Attributes:
        rows: of a micro-batch.
        replicas: copies of the model.
        zero: whether ZeRO-1 cuts states.
        whole: no stage of any lane uses tensor parallelism; states are then cut another way.
    """

    rows: int
    replicas: int
    zero: int
    whole: bool = False


class Lanes:
    """Lanes under one problem, each worked out once."""

    def __init__(self, prices: Prices, quick: bool = True) -> None:
        """`quick` trades the last half percent of a lane for speed."""
        self.prices = prices
        self.quick = quick
        self.worked_out = 0
        self._known: dict[tuple[Blocks, Setting, int], Lane | None] = {}

    def learn(self, other: "Lanes") -> None:
        """Take over lanes that were worked out under the same model."""
        self._known.update(other._known)

    def best(self, blocks: Blocks, setting: Setting, micro_batches: int) -> Lane | None:
        """The lane of these blocks in this order for about so many micro-batches; None where memory does not do."""
        key = (blocks, setting, micro_batches)
        if key not in self._known:
            self.worked_out += 1
            self._known[key] = self._best(blocks, setting, micro_batches)
        return self._known[key]

    def loads(
        self, blocks: Blocks, setting: Setting, micro_batches: int, recompute: str
    ) -> tuple[StageLoad, ...]:
        """What each stage costs, sending to its neighbours included where it waits for that."""
        depth, multiple = len(blocks), lcm(*(block.tp for block in blocks))
        found = []
        for place, block in enumerate(blocks):
            first, last = place == 0, place == depth - 1
            where = Where(
                block, first, last, multiple, setting.rows, setting.replicas, setting.zero, setting.whole
            )
            sides = (not first) + (not last)
            moved = min(sides * micro_batches, SENDING_PER_STAGE * depth) + min(1, sides)
            flight = min(micro_batches, depth - place)
            found.append(self.prices.load(where, flight, moved, recompute))
        return tuple(found)

    def _best(self, blocks: Blocks, setting: Setting, micro_batches: int) -> Lane | None:
        total, m = self.prices.problem.config.num_layers, max(1, micro_batches)
        if len(blocks) > total:
            return None
        found: list[tuple[float, str, tuple[int, ...], tuple[int, ...]]] = []
        for recompute in ("none", *self.prices.problem.choices.recompute):
            loads = self.loads(blocks, setting, m, recompute)
            layers = split_layers(total, loads, m, self.quick)
            if layers is not None:
                again = tuple(load.recomputed(n) for load, n in zip(loads, layers, strict=True))
                found.append((closed_form(loads, layers, m), recompute, layers, again))
                if recompute == "none" and self._is_near(loads, layers, m):
                    break
        if not found:
            return None
        _, recompute, layers, again = min(found)
        load = self.load(blocks, setting.rows, layers, again, recompute, m)
        return Lane(blocks, setting.rows, layers, recompute, again, load)

    def _is_near(self, loads: Sequence[StageLoad], layers: Sequence[int], micro_batches: int) -> bool:
        """Whether recomputation cannot help, or not by much where the search is quick."""
        free = without_limits(self.prices.problem.config.num_layers, loads, micro_batches)
        least = closed_form([load.free for load in loads], free, micro_batches)
        return closed_form(loads, layers, micro_batches) <= least * (NEAR if self.quick else 1.0)

    def load(
        self,
        blocks: Blocks,
        rows: int,
        layers: Sequence[int],
        again: Sequence[int],
        recompute: str,
        micro_batches: int,
    ) -> PipelineLoad:
        """Seconds by number of micro-batches: exact at `micro_batches`, and on the line of its slowest stage around it."""
        seconds = self.stage_seconds(blocks, rows, layers, again, recompute)
        slowest = max(forward + backward for forward, backward in seconds)
        exact = self.pipeline_seconds(blocks, rows, seconds, micro_batches)
        return PipelineLoad(exact - (micro_batches - 1) * slowest, slowest)

    def stage_seconds(
        self, blocks: Blocks, rows: int, layers: Sequence[int], again: Sequence[int], recompute: str
    ) -> list[tuple[float, float]]:
        """Forward and backward of one micro-batch on every stage."""
        found = []
        for place, (block, count, over) in enumerate(zip(blocks, layers, again, strict=True)):
            plain = self.prices.layer(block, rows)
            forward, backward = (count - over) * plain.forward, (count - over) * plain.backward
            if over:
                twice = self.prices.layer(block, rows, recompute)
                forward, backward = forward + over * twice.forward, backward + over * twice.backward
            for last, held in ((False, place == 0), (True, place == len(blocks) - 1)):
                if held:
                    end = self.prices.end(block, rows, last)
                    forward, backward = forward + end.forward, backward + end.backward
            found.append((forward, backward))
        return found

    def pipeline_seconds(
        self, blocks: Blocks, rows: int, seconds: Sequence[tuple[float, float]], micro_batches: int
    ) -> float:
        """When the last backward ends under 1F1B, neighbours as near as they can be."""
        depth, m = len(blocks), micro_batches
        if depth == 1:
            return m * sum(seconds[0])
        counted = min(m, (QUICK_PERIODS if self.quick else PERIODS) * depth)
        order = order_of("1f1b", depth, counted)
        own = [seconds[stage][kind == "B"] for stage, kind, _ in order.slots]
        between = travels(self.prices, blocks, rows)
        travel = [between[min(pair)] for pair in order.boundaries]
        ends = max(order.run(own, travel, (0.0,) * depth))
        return ends + (m - counted) * max(forward + backward for forward, backward in seconds)
