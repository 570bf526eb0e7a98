"""Works sketches out to drafts, each once: what belongs to a lane is shared (paper A.1, first level)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

from hetero_megatron.planner.lanes import Blocks, Lane, Lanes
from hetero_megatron.planner.level_two import deal_micro_batches
from hetero_megatron.planner.placement import place
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block
from hetero_megatron.planner.profiles import Operation
from hetero_megatron.planner.realize import price, strategy_of
from hetero_megatron.planner.sketch import Draft, Sketch

FP32 = 4
TIMED_DEVICES = 64
"""Up to so many devices, placing and timing a draft costs less than choosing a wrong one."""


class Drafts:
    """Works out sketches; what belongs to a lane is worked out once."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.lanes = Lanes(prices)
        self.known: dict[Sketch, Draft | None] = {}
        self._speeds: dict[Block, float] = {}
        self._lane_speeds: dict[Blocks, float] = {}
        problem = prices.problem
        self._work = problem.config.num_layers * problem.global_batch_size

    def speed(self, block: Block) -> float:
        """Rows through a layer per second, at the best size of a micro-batch."""
        if block not in self._speeds:
            self._speeds[block] = max(
                rows / self.prices.layer(block, rows).total for rows in self.prices.problem.rows
            )
        return self._speeds[block]

    def least_seconds(self, sketch: Sketch) -> float:
        """What any plan on these blocks takes at least: all layers of all rows over the speed of all blocks."""
        speed = 0.0
        for lane, alike in groupby(sketch.lanes):
            if lane not in self._lane_speeds:
                self._lane_speeds[lane] = sum(map(self.speed, lane))
            speed += self._lane_speeds[lane] * len(list(alike))
        return self._work / speed

    def likely_seconds(self, sketch: Sketch) -> float:
        """The same with the bubble of equal stages: what a well balanced plan of these lanes takes."""
        depth = max(map(len, sketch.lanes))
        each = self.prices.problem.global_batch_size / sketch.rows / len(sketch.lanes)
        return self.least_seconds(sketch) * (1 + (depth - 1) / max(1.0, each))

    def bound(self) -> float:
        """What any plan on this cluster takes at least: every device at the best speed that it has in any block."""
        supply, blocks = self.prices.problem.supply, self.prices.problem.blocks
        speed = 0.0
        for kind, own in blocks.items():
            if own:
                speed += supply.count[kind] * max(self.speed(block) / block.ranks for block in own)
        return self._work / speed

    def draft(self, sketch: Sketch, limit: float = inf) -> Draft | None:
        """Layers, micro-batches and seconds of a sketch; None where some lane does not fit into memory.

        On clusters of up to `TIMED_DEVICES`, the seconds of a draft whose pipelines take less than `limit` are the cost
        model's own, with ranks; else about that.
        """
        if sketch not in self.known:
            self.known[sketch] = self._draft(sketch)
        draft = self.known[sketch]
        few = len(self.prices.problem.cluster.devices) <= TIMED_DEVICES
        if draft is not None and few and not draft.timed and draft.pipeline_seconds < limit:
            self.known[sketch] = draft = self._timed(draft)
        return draft

    def _timed(self, draft: Draft) -> Draft | None:
        cluster, sketch = self.prices.problem.cluster, draft.sketch
        ranks = place(cluster, sketch.lanes)
        if ranks is None:
            return None
        found = price(strategy_of(draft, ranks, cluster, sketch.zero), cluster, self.prices.costs)
        return None if found is None else replace(draft, seconds=found.seconds, timed=True)

    def _draft(self, sketch: Sketch) -> Draft | None:
        setting, total = sketch.setting, self.prices.problem.global_batch_size // sketch.rows
        if len(sketch.lanes) > total:
            return None
        about = -(-total // len(sketch.lanes))
        first = [self.lanes.best(blocks, setting, about) for blocks in sketch.lanes]
        if any(lane is None for lane in first):
            return None
        counts = deal_micro_batches(total, [lane.load for lane in first if lane is not None])
        # Once more with the counts that the first round gave: layers and seconds are exact for those.
        lanes = [
            self.lanes.best(blocks, setting, max(1, count))
            for blocks, count in zip(sketch.lanes, counts, strict=True)
        ]
        chosen = [lane for lane in lanes if lane is not None]
        if len(chosen) < len(lanes):
            return None
        again = deal_micro_batches(total, [lane.load for lane in chosen])
        if again != counts:
            exact = [
                self.lanes.best(blocks, setting, max(1, count))
                for blocks, count in zip(sketch.lanes, again, strict=True)
            ]
            if all(lane is not None for lane in exact):
                options = [(chosen, counts), ([lane for lane in exact if lane is not None], again)]
                chosen, counts = min(options, key=lambda option: self._slowest(*option))
        slowest = self._slowest(chosen, counts)
        return Draft(sketch, tuple(chosen), tuple(counts), slowest, slowest + self._tail(sketch, chosen))

    @staticmethod
    def _slowest(lanes: Sequence[Lane], counts: Sequence[int]) -> float:
        return max(lane.load.seconds(count) for lane, count in zip(lanes, counts, strict=True))

    def _tail(self, sketch: Sketch, lanes: Sequence[Lane]) -> float:
        """About what gradients take that no backward pass hides; the cost model says it exactly for plans with ranks."""
        setting, costs = sketch.setting, self.prices.costs
        if setting.replicas < 2:
            return 0.0
        link, weights = costs.cluster.inter_node, costs.work.layer_parameters
        worst = 0.0
        for lane in dict.fromkeys(lanes):
            for block, layers in zip(lane.blocks, lane.layers, strict=True):
                size = FP32 * layers * weights / block.tp
                how: Operation = "reduce_scatter" if sketch.zero else "all_reduce"
                seconds = costs.profiles.transfer_seconds(link, how, setting.replicas, size)
                hidden = layers * self.prices.layer(block, sketch.rows).backward
                worst = max(worst, seconds / layers + max(0.0, seconds - hidden))
        return worst
