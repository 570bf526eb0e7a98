"""Activations in host memory between a micro-batch's forward and its backward (Megatron's activation offloading).

What autograd keeps is copied to host buffers while the forward goes on and is brought back, a few tensors ahead,
while the backward runs. On a GPU the buffers are pinned and both directions have a stream of their own. On a CPU
device the same path copies to another buffer of the same memory: it proves the machinery and saves nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hetero_megatron.activations import FETCHED_AHEAD, SMALLEST_OFFLOADED


class HostBuffers:
    """Host memory that is used again and again; pinned where the device is a GPU."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def take(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """At least `size` bytes, less than twice as many, and what must have happened before they are written."""
        fitting = [place for place, (one, _) in enumerate(self._free) if size <= one.numel() < 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda place: self._free[place][0].numel()))
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), None

    def give(self, buffer: Tensor, read: torch.cuda.Event | None) -> None:
        """Take a buffer back; it may still be read until `read`."""
        self._free.append((buffer, read))

    @property
    def free_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return sum(buffer.numel() for buffer, _ in self._free)


class _Streams:
    """One stream out and one back on a GPU; on a CPU everything happens at once and in order."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        if self._cuda:
            self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_out(
        self, host: Tensor, source: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Start to copy a device tensor, made by the current stream, to the host."""
        if not self._cuda:
            host.copy_(source)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        if free is not None:
            self._out.wait_event(free)
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._out)
        return self._out.record_event()

    def copy_back(
        self, target: Tensor, host: Tensor, written: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Start to copy to a device tensor that the current stream has allocated."""
        if not self._cuda:
            target.copy_(host)
            return None
        # The memory may have belonged to a tensor that the current stream still reads.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        if written is not None:
            self._back.wait_event(written)
        with torch.cuda.stream(self._back):
            target.copy_(host, non_blocking=True)
        target.record_stream(self._back)
        return self._back.record_event()

    def join(self, event: torch.cuda.Event | None) -> None:
        """The current stream goes on when `event` has happened."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


class _Moved:
    """One storage in host memory, and on the device again from just before its first use until its last."""

    def __init__(self, source: Tensor, device: torch.device, streams: _Streams, buffers: HostBuffers) -> None:
        self._streams, self._buffers, self._device = streams, buffers, device
        self._size = source.numel()
        self._host, free = buffers.take(self._size)
        self._written = streams.copy_out(self._host[: self._size], source, free)
        self._read: torch.cuda.Event | None = None
        self._back: Tensor | None = None
        self.users = 0

    def fetch(self) -> None:
        """Start to bring it back, unless it is on its way."""
        if self._back is None:
            self._back = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._read = self._streams.copy_back(self._back, self._host[: self._size], self._written)

    def use(self, first_time: bool) -> Tensor:
        """Its bytes on the device; after the last user nothing here holds them any longer."""
        self.fetch()
        assert self._back is not None
        bytes_ = self._back
        self._streams.join(self._read)
        self.users -= first_time
        if self.users <= 0:
            self._back = None
        return bytes_

    def __del__(self) -> None:
        """Autograd drops what a backward has used: then the host buffer is free."""
        if hasattr(self, "_written"):
            self._buffers.give(self._host, self._read or self._written)


@dataclass(slots=True)
class _Saved:
    """A saved tensor: a view of a moved storage."""

    trip: "Trip"
    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    used: bool = False


@dataclass(slots=True)
class Trip:
    """What one micro-batch's forward has moved, in order."""

    moved: list[_Moved] = field(default_factory=list)
    moved_bytes: int = 0

    def fetch_before(self, place: int) -> None:
        """Bring back the storages that the backward, which goes from last to first, will ask for next."""
        for each in self.moved[max(0, place - FETCHED_AHEAD) : place]:
            if each.users > 0:
                each.fetch()

    def start_back(self) -> None:
        """The backward is about to begin."""
        self.fetch_before(len(self.moved))


class Offload:
    """Moves what the forward passes of one stage keep; parameters and small tensors stay."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, _Streams(device)
        self.buffers = HostBuffers(pinned=device.type == "cuda")

    @contextmanager
    def forward(self, parameters: Iterable[Tensor]) -> Iterator[Trip]:
        """Around one forward pass. `parameters` share their storages with nothing that an activation uses."""
        trip = Trip()
        stay = {parameter.untyped_storage()._cdata for parameter in parameters}
        with saved_tensors_hooks(self._packer(trip, stay), _unpack):
            yield trip

    def _packer(self, trip: Trip, stay: set[int]) -> Callable[[Tensor], Tensor | _Saved]:
        # A storage that is saved several times moves once. The weak reference keeps its address from being used
        # again; a storage that was written to in between is another one.
        seen: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            storage = tensor.untyped_storage()
            if (
                storage.nbytes() < SMALLEST_OFFLOADED
                or storage._cdata in stay
                or tensor.device.type != self._device.type
            ):
                return tensor
            key = (storage._cdata, tensor._version)
            if key not in seen:
                source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                trip.moved.append(_Moved(source, self._device, self._streams, self.buffers))
                trip.moved_bytes += storage.nbytes()
                seen[key] = StorageWeakRef(storage), len(trip.moved) - 1
            place = seen[key][1]
            trip.moved[place].users += 1
            return _Saved(
                trip, place, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        return pack


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    moved = saved.trip.moved[saved.place]
    bytes_ = moved.use(not saved.used)
    saved.used = True
    saved.trip.fetch_before(saved.place)
    result = torch.empty(0, dtype=saved.dtype, device=bytes_.device)
    return result.set_(bytes_.untyped_storage(), saved.offset, saved.size, saved.stride)
