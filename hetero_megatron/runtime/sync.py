"""Gradient synchronisation: the Post Reshards, one Exchange per bucket (paper §5.2, A.2)."""

from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.state import State
from hetero_megatron.runtime.world import Groups, World


class GradientSync:
    """From the gradient each rank computed to the layout of the optimizer states, bucket by bucket."""

    def __init__(self, state: State, world: World, groups: Groups) -> None:
        self._buckets = []
        for bucket in state.buckets:
            if not bucket.plan.stages:
                continue
            views = [state.view(state.gradient, slot) for slot in bucket.slots]
            exchange = Exchange(bucket.plan, world.rank, groups, [slot.full_shape for slot in bucket.slots])
            self._buckets.append((exchange, views, state.gradient[bucket.span]))

    def run(self) -> None:
        """Reduce all buckets, in plan order on every rank."""
        for exchange, views, flat in self._buckets:
            for made, view in zip(exchange.run(views, flat), views, strict=True):
                if made is not view:
                    view.copy_(made)
