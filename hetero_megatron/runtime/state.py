"""Parameters, FP32 master weights, gradients and Adam moments of one rank, in flat buffers (DESIGN decision 5).

There are two layouts. Parameters, and the gradients that a backward pass makes of them, lie as the parameter's
annotation says; master weights, moments and the gradients to update them with lie as its `@state` annotation says.
They are the same unless ZeRO-1 cuts the states, and then they share one buffer. Parameters with the same
communication form a bucket: a run of the flat buffers, so that a bucket travels without packing. Sizes are local;
`full_shape` is the global one.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hetero_megatron.annotation import Annotation
from hetero_megatron.annotation.region import Bounds
from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.pages import prefer_large_pages

Shape = tuple[int, ...]
# Megatron's default: large enough for full bandwidth, small enough to travel while the backward pass goes on.
BUCKET_ELEMENTS = 40_000_000


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter that this rank holds: full shape, both layouts, and how gradients and values change between them.

    Attributes:
        post: from the gradient as it is produced to the layout of the states.
        pre: from the layout of the states to the parameter's own.
        kin: parameters of different `kin` do not share a bucket.
    """

    name: str
    full_shape: Shape
    parameter: Annotation
    states: Annotation
    post: CommPlan
    pre: CommPlan
    kin: Hashable = None

    @property
    def key(self) -> Hashable:
        """Equal for parameters that may travel together."""
        # Plans are resolved once per distinct pair of annotations, so the same plan is the same object.
        return id(self.post), id(self.pre), self.kin


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A local shard in one of the two layouts: where it lies in the tensor and in the flat buffers.

    Attributes:
        counted: whether this rank counts the shard in global norms; every element is counted on one rank.
        is_elsewhere: the layout gives this rank no part of the parameter.
    """

    name: str
    full_shape: Shape
    annotation: Annotation
    bounds: Bounds
    offset: int
    counted: bool
    is_elsewhere: bool = False

    @property
    def shape(self) -> Shape:
        """Local shape."""
        return tuple(hi - lo for lo, hi in self.bounds)

    @property
    def elements(self) -> int:
        """Local number of elements."""
        return prod(self.shape)


Slots = tuple[ParameterSlot, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together: their slots in both layouts, the same tuple where these are equal.

    A slot is empty in a layout that gives this rank no part.
    """

    post: CommPlan
    pre: CommPlan
    parameters: Slots
    states: Slots


def span(slots: Slots) -> slice:
    """The place of consecutive slots in the flat buffers of their layout."""
    return slice(slots[0].offset, slots[-1].offset + slots[-1].elements)


def lay_out(
    rank: int, placements: Sequence[Placement], bucket_elements: int = BUCKET_ELEMENTS
) -> tuple[Bucket, ...]:
    """Buckets of a rank's parameters, in flat-buffer order, of about `bucket_elements` elements of the full tensors.

    Ranks that communicate make the same buckets: their parameters with one plan are the same ones, in one order.
    """
    cuts: list[list[Placement]] = []
    latest: dict[Hashable, list[Placement]] = {}
    for placement in placements:
        key = placement.key
        if key not in latest or sum(prod(p.full_shape) for p in latest[key]) >= bucket_elements:
            cuts.append([])
            latest[key] = cuts[-1]
        latest[key].append(placement)
    buckets, at, at_states = [], 0, 0
    for members in cuts:
        parameters = _slots(rank, members, [each.parameter for each in members], at)
        states = _slots(rank, members, [each.states for each in members], at_states)
        at, at_states = span(parameters).stop, span(states).stop
        buckets.append(Bucket(members[0].post, members[0].pre, parameters, states))
    return tuple(buckets)


def _slots(
    rank: int, placements: Sequence[Placement], annotations: Sequence[Annotation], offset: int
) -> Slots:
    slots = []
    for placement, annotation in zip(placements, annotations, strict=True):
        shape = placement.full_shape
        here = annotation.subgroup_of(rank) is not None
        bounds = annotation.region(rank).bounds(shape) if here else ((0, 0),) * len(shape)
        slots.append(
            ParameterSlot(
                placement.name, shape, annotation, bounds, offset, is_counted(annotation, rank), not here
            )
        )
        offset += slots[-1].elements
    return tuple(slots)


def is_counted(annotation: Annotation, rank: int) -> bool:
    """Whether `rank` is the first holder of its part: copies inside a subgroup and across subgroups count once."""
    subgroup = annotation.subgroup_of(rank)
    if subgroup is None or (annotation.hdim < 0 and subgroup > 0):
        return False
    return all(place == 0 for dim, place in annotation.coord(rank).items() if dim < 0)


def view(flat: Tensor, slot: ParameterSlot) -> Tensor:
    """The slot's part of a flat buffer, in its local shape."""
    return flat[slot.offset : slot.offset + slot.elements].view(slot.shape)


def _present(slots: Iterable[ParameterSlot]) -> Slots:
    """Those of which the rank that they are for has a part."""
    return tuple(slot for slot in slots if not slot.is_elsewhere)


class State:
    """The flat buffers and the parameters that are views of them.

    Attributes:
        slots: the layout of `master`, `gradient` and the `moments`, all FP32.
        parameter_slots: the layout of `compute`, in `dtype`, and of `accumulated`, FP32: the gradients of this
            rank's own micro-batches.
        is_apart: whether the two layouts need buffers of their own: ZeRO-1, or states in host memory (`offload`).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        device: torch.device,
        offload: bool = False,
        held: bool = True,
        shared: "State | None" = None,
    ) -> None:
        """Buffers of zeros; without `held` of anything, untouched: to be released once all views are made.

        With `shared` master weights, moments and the gradients to update them with are those of another State.

        Raises:
            RuntimeFailure: the other State has another layout, or lies in other memory.
        """
        self.buckets = tuple(buckets)
        self.slots = _present(slot for bucket in buckets for slot in bucket.states)
        self.parameter_slots = _present(slot for bucket in buckets for slot in bucket.parameters)
        # By annotation, not by bounds: a rank whose piece is the whole tensor must still gather with the others.
        self.is_apart = offload or any(
            own.annotation != other.annotation
            for bucket in buckets
            for own, other in zip(bucket.states, bucket.parameters, strict=True)
        )
        self.device = torch.device("cpu") if offload else device
        # Pinned memory is what a GPU copies from and to while it computes.
        pinned = offload and device.type == "cuda"

        def empty(slots: Slots, dtype: torch.dtype, states: bool) -> Tensor:
            total = sum(slot.elements for slot in slots)
            place = self.device if states else device
            return torch.empty(total, dtype=dtype, device=place, pin_memory=states and pinned)

        # 1 where this rank counts a slot in global norms, 0 where another one does.
        self.counted = torch.tensor(
            [float(slot.counted) for slot in self.slots], dtype=torch.float64, device=self.device
        )
        if shared is None:
            self.master = empty(self.slots, torch.float32, True)
            self.gradient = empty(self.slots, torch.float32, True)
            self.moments = {
                name: empty(self.slots, torch.float32, True) for name in ("exp_avg", "exp_avg_sq")
            }
        else:
            self._check_shared(shared)
            # Views can be made of memory alone; nothing is written to it.
            shared.take("master", "gradient", *shared.moments)
            self.master, self.gradient, self.moments = shared.master, shared.gradient, shared.moments
        self.step = 0
        is_one = dtype is torch.float32 and not self.is_apart
        self.compute = self.master if is_one else empty(self.parameter_slots, dtype, False)
        self.accumulated = (
            empty(self.parameter_slots, torch.float32, False) if self.is_apart else self.gradient
        )
        self.parameters = {slot.name: self._parameter(slot) for slot in self.parameter_slots}
        if held:
            self.hold()

    def _check_shared(self, other: "State") -> None:
        mine, theirs = ([(s.name, s.bounds, s.offset) for s in each.slots] for each in (self, other))
        if mine != theirs or self.device != other.device:
            what = f"{self.device} and {other.device}" if mine == theirs else "their layouts differ"
            raise RuntimeFailure(
                f"two programs cannot share optimizer states: {what}; give both the same states and offload_optimizer"
            )

    @property
    def own(self) -> tuple[str, ...]:
        """The buffers of parameters that are not buffers of states."""
        found = {"compute": self.master, "accumulated": self.gradient}
        return tuple(name for name, other in found.items() if self.flats[name] is not other)

    @property
    def flats(self) -> dict[str, Tensor]:
        """All buffers by name; two names may share one buffer."""
        found = {"master": self.master, "gradient": self.gradient} | self.moments
        return found | {"compute": self.compute, "accumulated": self.accumulated}

    @property
    def is_held(self) -> bool:
        """Whether all buffers have memory."""
        return all(flat.untyped_storage().nbytes() >= flat.nbytes for flat in self.flats.values())

    def take(self, *names: str) -> None:
        """Give these buffers memory, which holds anything; parameters and other views of them see it."""
        for name in names:
            flat = self.flats[name]
            if flat.untyped_storage().nbytes() < flat.nbytes:
                flat.untyped_storage().resize_(flat.nbytes)
                prefer_large_pages(flat)

    def hold(self) -> None:
        """Give all buffers memory, with zeros."""
        for name, flat in self.flats.items():
            self.take(name)
            flat.detach().zero_()

    def release(self, *names: str) -> None:
        """Give the memory of these buffers back; what they held is lost, and to look at it ends the process."""
        for name in names:
            self.flats[name].untyped_storage().resize_(0)

    def _parameter(self, slot: ParameterSlot) -> nn.Parameter:
        """A leaf whose gradient lands in the FP32 buffer, micro-batch after micro-batch."""
        parameter = nn.Parameter(view(self.compute, slot))
        gradient = view(self.accumulated, slot)
        if self.compute.dtype is torch.float32:
            parameter.grad = gradient
        else:
            parameter.register_post_accumulate_grad_hook(_accumulate_into(gradient))
        return parameter

    def initialise(self, value: Callable[[ParameterSlot], Tensor]) -> None:
        """Fill the master weights slot by slot; the parameters are made from them by `sync.ParameterGather`."""
        for slot in self.slots:
            view(self.master, slot).copy_(value(slot))

    def zero_gradient(self) -> None:
        """Forget the last step's gradients."""
        self.accumulated.zero_()

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
