"""What documents cost in one pipeline, as arrays: what sharing a step over pipelines asks for (paper A.1, scenario c)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.cost import Costs
from hetero_megatron.strategy import Pipeline

Floats = NDArray[np.float64]
# Where attention is so dear that every context-parallel exchange is hidden behind it.
HIDES_ALL = 1 << 20
_SIZE = 2048


@dataclass(frozen=True, slots=True, eq=False)
class PipelineWork:
    """Seconds of the slowest stage of a pipeline, both passes.

    Attributes:
        depth: stages.
        constant: of every micro-batch, however small.
        lengths, per_token: of a document by itself without the constant, per token, by its length.
        least_token, least_pair: no document takes less per token and per squared length, whatever else is in its
            micro-batch.
    """

    depth: int
    constant: float
    lengths: Floats
    per_token: Floats
    least_token: float
    least_pair: float

    def alone(self, lengths: NDArray[np.int64]) -> Floats:
        """Seconds of each of these documents, without the constant."""
        found: Floats = lengths * np.interp(lengths, self.lengths, self.per_token)
        return found

    def least(self, lengths: NDArray[np.int64]) -> Floats:
        """What each of these documents takes at least."""
        found: Floats = lengths * self.least_token + np.square(lengths, dtype=np.float64) * self.least_pair
        return found

    def seconds(self, load: float, batches: int, largest: float) -> float:
        """Of a pipeline whose micro-batches take `load` together without their constants, the largest of them `largest`."""
        return load + batches * self.constant + (self.depth - 1) * (largest + self.constant)

    def best_count(self, load: float, least: int, most: int) -> int:
        """How many micro-batches: more of them leave smaller bubbles, and each has its constant."""
        if self.depth == 1 or most <= least:
            return max(1, least)
        if self.constant * most**2 <= load * (self.depth - 1):
            return most
        return max(1, least, round((load * (self.depth - 1) / self.constant) ** 0.5))


def pipeline_work(costs: Costs, pipeline: Pipeline, longest: int) -> PipelineWork:
    """What documents of up to `longest` tokens cost in this pipeline."""

    def of_stage(stage: int, tokens: int, pairs: int) -> float:
        chunks = range(max(1, len(pipeline.stages[stage].chunks)))
        return sum(costs.chunk(pipeline, stage, chunk, tokens, pairs).total for chunk in chunks)

    typical = [of_stage(stage, _SIZE, _SIZE**2 // 4) for stage in range(len(pipeline.stages))]
    slowest = max(range(len(typical)), key=typical.__getitem__)

    def slot(tokens: int, pairs: int) -> float:
        return of_stage(slowest, tokens, pairs)

    once, twice = slot(_SIZE, _SIZE**2), slot(2 * _SIZE, 2 * _SIZE**2)
    constant = max(0.0, 2 * once - twice)
    grid = np.unique(np.round(np.geomspace(min(32, longest), longest, 20)).astype(np.int64))
    each = [max(0.0, slot(length, length * length) - constant) / length for length in grid.tolist()]
    far = _SIZE * HIDES_ALL
    least_pair = max(0.0, (slot(_SIZE, 2 * far) - slot(_SIZE, far)) / far)
    least_token = max(0.0, (slot(_SIZE, far) - constant - least_pair * far) / _SIZE)
    return PipelineWork(
        len(pipeline.stages),
        constant,
        grid.astype(np.float64),
        np.array(each),
        least_token,
        least_pair,
    )
