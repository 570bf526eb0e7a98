"""Costs that know what a micro-batch takes however small it is; published rates alone would cut steps into crumbs."""

from hetero_megatron.planner.cost import Costs, Seconds
from hetero_megatron.strategy import Pipeline

LAYER_SECONDS = 2.0e-3
"""Per layer and micro-batch, both passes: Hydraulis' fits of a 32B Llama of 60 layers on A800 have constants of 120.7,
122.9 and 145.7 ms at TP4, 8 and 16, and of 65.4, 61.8, 35.3 and 25.4 ms per stage of 30 and 15 layers."""


class SmallBatchCosts(Costs):
    """Costs with a constant per layer and micro-batch, unless a profile has measured one."""

    @property
    def layer_seconds(self) -> float:
        """The constant, both passes; a CPU starts no kernels."""
        if self.profiles.measurements or any(kind.name == "cpu" for kind in self.cluster.kinds):
            return 0.0
        return LAYER_SECONDS

    def chunk(self, pipeline: Pipeline, stage: int, chunk: int, tokens: int, pairs: int) -> Seconds:
        """One chunk of one stage on a micro-batch; its share of embedding, head and constants included."""
        found = super().chunk(pipeline, stage, chunk, tokens, pairs)
        chunks = pipeline.stages[stage].chunks
        if not chunks or not self.layer_seconds:
            return found
        first, last = chunks[chunk]
        extra = (last - first + 1) * self.layer_seconds
        return found + Seconds(extra / 3, 2 * extra / 3)
