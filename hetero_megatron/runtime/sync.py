"""Between the layout of parameters and that of optimizer states: Post and Pre, one Exchange per bucket (paper §5.2, A.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.state import Slots, State, span, view
from hetero_megatron.runtime.world import Groups, World


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One bucket in one direction: from views of one flat buffer to views of another, or of the same one."""

    exchange: Exchange | None
    source: Tensor
    sources: list[Tensor]
    target: Tensor
    targets: list[Tensor]

    def run(self, dtype: torch.dtype, device: torch.device) -> None:
        """Exchange in `dtype` on `device`; the result ends in the target."""
        if self.exchange is None:
            self.target.copy_(self.source)
            return
        flat, sources = self.source, self.sources
        if (flat.dtype, flat.device.type) != (dtype, device.type):
            flat = flat.to(device, dtype)
            parts = zip(flat.split([view.numel() for view in sources]), sources, strict=True)
            sources = [part.view(view.shape) for part, view in parts]
        for made, target in zip(self.exchange.run(sources, flat), self.targets, strict=True):
            if made is not target:
                target.copy_(made)


def _bucket(
    plan: CommPlan, rank: int, groups: Groups, sides: tuple[tuple[Tensor, Slots], tuple[Tensor, Slots]]
) -> _Bucket:
    (source, before), (target, after) = sides
    exchange = Exchange(plan, rank, groups, [slot.full_shape for slot in before]) if plan.stages else None
    sources = [view(source, slot) for slot in before]
    return _Bucket(
        exchange,
        source[span(before)],
        sources,
        target[span(after)],
        # What is summed in place is already where it belongs.
        sources if source is target else [view(target, slot) for slot in after],
    )


class GradientSync:
    """Post: from the gradient that each rank computed to the layout of the optimizer states."""

    def __init__(self, state: State, world: World, groups: Groups) -> None:
        self._device = world.device
        self._buckets = [
            _bucket(
                bucket.post,
                world.rank,
                groups,
                ((state.accumulated, bucket.parameters), (state.gradient, bucket.states)),
            )
            for bucket in state.buckets
            if bucket.post.stages or state.is_apart
        ]

    def run(self) -> None:
        """Reduce all buckets, in plan order on every rank."""
        for bucket in self._buckets:
            bucket.run(torch.float32, self._device)


class ParameterGather:
    """Pre: from the master weights to the parameters, rounded to their dtype before they travel."""

    def __init__(self, state: State, world: World, groups: Groups) -> None:
        self._dtype, self._device = state.compute.dtype, world.device
        self._buckets = [
            _bucket(
                bucket.pre,
                world.rank,
                groups,
                ((state.master, bucket.states), (state.compute, bucket.parameters)),
            )
            for bucket in state.buckets
            if state.compute is not state.master
        ]

    def run(self) -> None:
        """Make all parameters from the master weights, in plan order on every rank."""
        for bucket in self._buckets:
            bucket.run(self._dtype, self._device)
