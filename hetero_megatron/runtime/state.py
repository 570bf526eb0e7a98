"""Parameters, FP32 master weights, gradients and Adam moments of one rank, in flat buffers (DESIGN decision 5).

Parameters with the same gradient plan form a bucket: a run of one flat buffer, so that a bucket is synchronised
without packing. Sizes are local; `full_shape` is the global one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hetero_megatron.annotation import Annotation
from hetero_megatron.annotation.region import Bounds
from hetero_megatron.comm.steps import CommPlan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One local parameter: where its shard lies in the tensor, in the flat buffers, and who else holds it.

    Attributes:
        counted: whether this rank counts the shard in global norms; every element is counted on one rank.
    """

    name: str
    full_shape: Shape
    annotation: Annotation
    bounds: Bounds
    post: CommPlan
    offset: int
    counted: bool

    @property
    def shape(self) -> Shape:
        """Local shape."""
        return tuple(hi - lo for lo, hi in self.bounds)

    @property
    def elements(self) -> int:
        """Local number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of slots with one gradient plan."""

    plan: CommPlan
    slots: tuple[ParameterSlot, ...]

    @property
    def span(self) -> slice:
        """Its place in the flat buffers."""
        last = self.slots[-1]
        return slice(self.slots[0].offset, last.offset + last.elements)


def lay_out(rank: int, parameters: Sequence[tuple[str, Shape, Annotation, CommPlan]]) -> tuple[Bucket, ...]:
    """Buckets of a rank's parameters (name, full shape, annotation, gradient plan), in flat-buffer order."""
    by_plan: dict[int, tuple[CommPlan, list[tuple[str, Shape, Annotation]]]] = {}
    for name, shape, annotation, plan in parameters:
        # Plans are resolved once per distinct pair of annotations, so the same plan is the same object.
        by_plan.setdefault(id(plan), (plan, []))[1].append((name, shape, annotation))
    buckets, offset = [], 0
    for plan, members in by_plan.values():
        slots = []
        for name, shape, annotation in members:
            bounds = annotation.region(rank).bounds(shape)
            slots.append(
                ParameterSlot(name, shape, annotation, bounds, plan, offset, is_counted(annotation, rank))
            )
            offset += slots[-1].elements
        buckets.append(Bucket(plan, tuple(slots)))
    return tuple(buckets)


def is_counted(annotation: Annotation, rank: int) -> bool:
    """Whether `rank` is the first holder of its part: copies inside a subgroup and across subgroups count once."""
    subgroup = annotation.subgroup_of(rank)
    if subgroup is None or (annotation.hdim < 0 and subgroup > 0):
        return False
    return all(place == 0 for dim, place in annotation.coord(rank).items() if dim < 0)


class State:
    """The flat buffers and the parameters that are views of them."""

    def __init__(self, buckets: Sequence[Bucket], dtype: torch.dtype, device: torch.device) -> None:
        self.buckets = tuple(buckets)
        self.slots = tuple(slot for bucket in buckets for slot in bucket.slots)
        total = sum(slot.elements for slot in self.slots)
        self.device = device
        # 1 where this rank counts a slot in global norms, 0 where another one does.
        self.counted = torch.tensor(
            [float(slot.counted) for slot in self.slots], dtype=torch.float64, device=device
        )
        self.master = torch.zeros(total, dtype=torch.float32, device=device)
        self.gradient = torch.zeros_like(self.master)
        self.moments = {"exp_avg": torch.zeros_like(self.master), "exp_avg_sq": torch.zeros_like(self.master)}
        self.step = 0
        self.compute = (
            self.master if dtype is torch.float32 else torch.zeros(total, dtype=dtype, device=device)
        )
        self.parameters = {slot.name: self._parameter(slot) for slot in self.slots}

    def view(self, flat: Tensor, slot: ParameterSlot) -> Tensor:
        """The slot's part of a flat buffer, in its local shape."""
        return flat[slot.offset : slot.offset + slot.elements].view(slot.shape)

    def _parameter(self, slot: ParameterSlot) -> nn.Parameter:
        """A leaf whose gradient lands in the FP32 buffer, micro-batch after micro-batch."""
        parameter = nn.Parameter(self.view(self.compute, slot))
        gradient = self.view(self.gradient, slot)
        if self.compute.dtype is torch.float32:
            parameter.grad = gradient
        else:
            parameter.register_post_accumulate_grad_hook(_accumulate_into(gradient))
        return parameter

    def initialise(self, value: Callable[[ParameterSlot], Tensor]) -> None:
        """Fill the master weights slot by slot and refresh the compute copies."""
        for slot in self.slots:
            self.view(self.master, slot).copy_(value(slot))
        self.refresh()

    def refresh(self) -> None:
        """Round the master weights into the compute copies (Pre)."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def zero_gradient(self) -> None:
        """Forget the last step's gradients."""
        self.gradient.zero_()

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Put the local shards in place of the modules' parameters."""
        for name, parameter in self.parameters.items():
            module, field = name.rsplit(".", 1)
            setattr(modules[module], field, parameter)


def _accumulate_into(gradient: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    return hook
