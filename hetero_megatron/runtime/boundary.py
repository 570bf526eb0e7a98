"""Activations and gradients between pipeline stages: one message per pair of ranks (paper §5.3, §6.3).

Both sides of a boundary may have different tensor-parallel degrees; the CommPlan says which slice goes where.
Sizes are known on both sides before anything is sent, so no shape travels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.annotation import Region
from hetero_megatron.comm.steps import Collective, CommPlan, Copy
from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.slices import Shape, Slices, count, local_slices, pack, unpack
from hetero_megatron.runtime.world import World

_CANARY_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class _Message:
    peer: int
    slices: tuple[Slices, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class _Side:
    """What one rank sends and receives over a boundary for one full shape."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]
    local_shape: Shape

    @property
    def is_one_piece(self) -> bool:
        """Whether all of the local shard arrives in one message, in its own order."""
        return len(self.receives) == 1 and len(self.receives[0].slices) == 1


class Boundary:
    """One direction of one boundary Reshard on one rank."""

    def __init__(self, name: str, plan: CommPlan, world: World) -> None:
        self.name, self.plan, self.world = name, plan, world
        steps = [step for stage in plan.stages for step in stage.steps]
        if len(plan.stages) != 1 or any(isinstance(step, Collective) for step in steps):
            raise RuntimeFailure(
                f"{name}: {plan.label} between two stages; a stage boundary can only send and receive, "
                "reduce inside the stage first"
            )
        self._steps = tuple(step for step in steps if not isinstance(step, Collective))
        self._side = lru_cache(maxsize=256)(self._compile)

    def _compile(self, full_shape: Shape) -> _Side:
        rank, plan = self.world.rank, self.plan
        inside = plan.src.region(rank).bounds(full_shape) if plan.src.subgroup_of(rank) is not None else None
        outside = plan.dst.region(rank).bounds(full_shape) if plan.dst.subgroup_of(rank) is not None else None
        sends: dict[int, list[Region]] = {}
        receives: dict[int, list[Region]] = {}
        for step in self._steps:
            if isinstance(step, Copy):
                assert step.rank != rank, f"{self.name}: rank {rank} stands on both sides of a boundary"
            elif step.src == rank:
                sends.setdefault(step.dst, []).append(step.region)
            elif step.dst == rank:
                receives.setdefault(step.src, []).append(step.region)
        return _Side(
            tuple(_message(peer, regions, full_shape, inside) for peer, regions in sorted(sends.items())),
            tuple(_message(peer, regions, full_shape, outside) for peer, regions in sorted(receives.items())),
            tuple(hi - lo for lo, hi in outside) if outside is not None else (),
        )

    def send(self, shard: Tensor, full_shape: Shape, tag: int) -> list[dist.P2POp]:
        """The sends of `shard`; the caller posts them with the batch they belong to."""
        operations = []
        for message in self._side(full_shape).sends:
            buffer = pack([shard] * len(message.slices), message.slices).contiguous()
            operations.append(dist.P2POp(dist.isend, buffer, self.world.index(message.peer), tag=tag))
        return operations

    def receive(
        self, full_shape: Shape, tag: int, dtype: torch.dtype
    ) -> tuple[list[dist.P2POp], Callable[[], Tensor]]:
        """The receives, and a function that returns the local shard once they are done."""
        side = self._side(full_shape)
        device = self.world.device
        buffers = [torch.empty(message.elements, dtype=dtype, device=device) for message in side.receives]
        for buffer in buffers:
            _mark(buffer)
        operations = [
            dist.P2POp(dist.irecv, buffer, self.world.index(message.peer), tag=tag)
            for message, buffer in zip(side.receives, buffers, strict=True)
        ]

        def finish() -> Tensor:
            for message, buffer in zip(side.receives, buffers, strict=True):
                self._check_size(message, buffer)
            if side.is_one_piece:
                return buffers[0].view(side.local_shape)
            shard = torch.empty(side.local_shape, dtype=dtype, device=device)
            for message, buffer in zip(side.receives, buffers, strict=True):
                unpack(buffer, [shard] * len(message.slices), message.slices)
            return shard

        return operations, finish

    def _check_size(self, message: _Message, buffer: Tensor) -> None:
        """A message that was cut leaves the marked end of the buffer untouched."""
        missing = _unwritten(buffer)
        if missing:
            at_most = "at most " if missing == _CANARY_ELEMENTS < message.elements else ""
            raise RuntimeFailure(
                f"{self.name}: rank {self.world.rank} expected {message.elements} elements from rank {message.peer}, "
                f"which sent {at_most}{message.elements - missing}; the two sides disagree on the size"
            )


def _message(
    peer: int, regions: Sequence[Region], full_shape: Shape, shard: tuple[tuple[int, int], ...] | None
) -> _Message:
    assert shard is not None, "a rank sends from, and receives into, a shard of its own"
    slices = tuple(local_slices(region, full_shape, shard) for region in regions)
    return _Message(peer, slices, count(slices))


# A NaN with a payload that no arithmetic produces; gloo fills a short message in without a word.
_CANARY_BITS = {2: 0x7FA5, 4: 0x7FA5C3A5}
_CANARY_TYPES = {2: torch.int16, 4: torch.int32}


def _mark(buffer: Tensor) -> None:
    if buffer.device.type == "cpu" and buffer.element_size() in _CANARY_BITS:
        buffer[-_CANARY_ELEMENTS:].view(_CANARY_TYPES[buffer.element_size()]).fill_(
            _CANARY_BITS[buffer.element_size()]
        )


def _unwritten(buffer: Tensor) -> int:
    """Number of elements at the end that still carry the mark."""
    if buffer.device.type != "cpu" or buffer.element_size() not in _CANARY_BITS or not buffer.numel():
        return 0
    bits = buffer[-_CANARY_ELEMENTS:].view(_CANARY_TYPES[buffer.element_size()])
    mark = _CANARY_BITS[buffer.element_size()]
    if int(bits[-1]) != mark:
        return 0
    written = (bits != mark).nonzero()
    return bits.numel() - (int(written[-1]) + 1 if written.numel() else 0)
