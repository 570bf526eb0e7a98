"""What a layer is told about its place in a strategy, once, before the first step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hetero_megatron.annotation.region import Bounds
from hetero_megatron.runtime.context_group import ContextGroup

Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Binding:
    """The local part of one layer.

    Attributes:
        name: the layer's node name, for errors.
        bounds: global integer [lo, hi) per dim of each parameter's local shard.
        full_shapes: global shape of each parameter.
        reductions: per split factor, the in-place all-reduce over the ranks that hold its other parts.
        kernels: the run's choice by operator (`attention`, `rms_norm`, `cross_entropy`); one left out is torch's.
        context: how tokens of other context-parallel parts are reached, for a layer whose tokens look at others.
        later: takes work that need not be done before the end of the backward pass; None: do it at once.
    """

    name: str
    bounds: Mapping[str, Bounds]
    full_shapes: Mapping[str, tuple[int, ...]]
    reductions: Mapping[str, Callable[[Tensor, str], Tensor]] = field(default_factory=dict)
    kernels: Kernels = field(default_factory=dict)
    context: ContextGroup | None = None
    later: Callable[[Callable[[], object]], None] | None = None

    def all_reduce(self, factor: str, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the ranks that share a split of `factor`; nothing where it is whole."""
        reduce = self.reductions.get(factor)
        return tensor if reduce is None else reduce(tensor, op)


class Bindable(Protocol):
    """A layer that learns its place."""

    def bind(self, binding: Binding) -> None:
        """Learn the local part."""


class Exchanging(Protocol):
    """A Reshard that runs the communication it is given."""

    exchange: Callable[[Tensor], Tensor] | None
