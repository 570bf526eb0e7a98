"""Messages of slices: packed, sent, received and unpacked, a wave of them at a time (paper §7, Figure 14)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.runtime.pages import prefer_large_pages
from hetero_megatron.runtime.slices import Slices
from hetero_megatron.runtime.state import ParameterSlot, view
from hetero_megatron.runtime.world import World

PHASES = ("pack", "move", "unpack")


@dataclass(slots=True)
class Moved:
    """What this rank sent, in bytes by receiver, and its seconds by phase; copies on the spot count as packing."""

    sent: dict[int, int]
    seconds: dict[str, float]

    def add(self, phase: str, since: float) -> float:
        """Book the time from `since` (`time.perf_counter`) until now; returns now."""
        now = time.perf_counter()
        self.seconds[phase] += now - since
        return now


@dataclass(frozen=True, slots=True)
class Place:
    """A slice of a shard in a flat buffer. The buffer has memory only now and then, so its view is made at need."""

    flat: Tensor
    slot: ParameterSlot
    slices: Slices

    def view(self) -> Tensor:
        """The slice, in its shape."""
        return view(self.flat, self.slot)[self.slices]

    @property
    def start(self) -> int | None:
        """Where the slice begins in the flat buffer, if it is one piece of it."""
        at, stride, is_cut = self.slot.offset, 1, False
        for part, size in zip(reversed(self.slices), reversed(self.slot.shape), strict=True):
            if is_cut and part.stop - part.start > 1:
                return None
            is_cut = is_cut or part.stop - part.start < size
            at += part.start * stride
            stride *= size
        return at


@dataclass(frozen=True, slots=True)
class Message:
    """Its pieces by transfer number: places in an old or a new buffer, or None for what this rank only passes on."""

    peer: int
    numbers: tuple[int, ...]
    places: tuple[Place | None, ...]
    counts: tuple[int, ...]
    run: tuple[Tensor, slice] | None

    @staticmethod
    def of(
        peer: int, numbers: Sequence[int], places: Sequence[Place | None], counts: Sequence[int]
    ) -> "Message":
        """With the run of a flat buffer that it is, if its pieces follow one another there."""
        return Message(peer, tuple(numbers), tuple(places), tuple(counts), _run(places, counts))

    def whole(self, device: torch.device) -> Tensor | None:
        """The part of a flat buffer that is the message: nothing to pack or unpack."""
        if self.run is None or self.run[0].device != device:
            return None
        flat, part = self.run
        return flat[part]

    def pieces(self, buffer: Tensor) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """(transfer, view, its part of the buffer) of every piece."""
        for number, place, part in zip(self.numbers, self.places, buffer.split(self.counts), strict=True):
            yield number, None if place is None else place.view(), part


def _run(places: Sequence[Place | None], counts: Sequence[int]) -> tuple[Tensor, slice] | None:
    first = places[0]
    if first is None or first.start is None:
        return None
    at = first.start
    for place, count in zip(places, counts, strict=True):
        if place is None or place.flat is not first.flat or place.start != at:
            return None
        at += count
    return first.flat, slice(first.start, at)


Wave = tuple[tuple[Message, ...], tuple[Message, ...]]
"""Messages to send and to receive."""


class Arena:
    """Memory for the messages of a round, FP32, used again in the next but one."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._flat = torch.empty(elements, dtype=torch.float32, device=device)
        prefer_large_pages(self._flat)
        self._used = 0

    def take(self, elements: int) -> Tensor:
        """The next part."""
        part = self._flat[self._used : self._used + elements]
        assert part.numel() == elements, f"{elements} elements do not fit behind {self._used}"
        self._used += elements
        return part

    def empty(self) -> None:
        """A new round begins: nobody uses the parts any more."""
        self._used = 0


class Transit:
    """A wave on its way: begun when it is made, over when `end` returns."""

    def __init__(
        self,
        wave: Wave,
        copies: Sequence[tuple[Place, Place]],
        world: World,
        arena: Arena,
        passing: dict[int, Tensor],
        moved: Moved,
    ) -> None:
        """Post the receives, pack and send, and copy on the spot meanwhile; `passing` is what arrived to be sent on."""
        self._world, self._arena, self._passing, self._moved = world, arena, passing, moved
        at = time.perf_counter()
        sends, receives = wave
        self._landing = [(message, self._room(message)) for message in receives]
        # NCCL needs both directions in one batch. On a CPU a message leaves while the next one is packed.
        self._together = world.device.type != "cpu"
        posted = [self._operation(dist.irecv, message, buffer) for message, buffer in self._landing]
        self._work = [] if self._together else _post(posted)
        for message in sends:
            buffer = self._pack(message)
            moved.sent[message.peer] = moved.sent.get(message.peer, 0) + buffer.nbytes
            operation = self._operation(dist.isend, message, buffer)
            if self._together:
                posted.append(operation)
            else:
                self._work += _post([operation])
        if self._together:
            self._work = _post(posted)
        for source, target in copies:
            target.view().copy_(source.view())
        moved.add("pack", at)

    def end(self) -> None:
        """Wait, and unpack what has arrived."""
        at = time.perf_counter()
        # Every handle is waited for once: gloo would wait for a second message.
        first = len(self._work) if self._together else len(self._landing)
        if self._together:
            _wait(self._work)
        for place, (message, buffer) in enumerate(self._landing):
            if not self._together:
                _wait(self._work[place : place + 1])
            at = self._moved.add("move", at)
            self._unpack(message, buffer)
            at = self._moved.add("unpack", at)
        _wait(self._work[first:])
        self._moved.add("move", at)

    def _operation(
        self, kind: Callable[..., dist.Work | None], message: Message, buffer: Tensor
    ) -> dist.P2POp:
        return dist.P2POp(kind, buffer, self._world.index(message.peer))

    def _room(self, message: Message) -> Tensor:
        whole = message.whole(self._world.device)
        return self._arena.take(sum(message.counts)) if whole is None else whole

    def _pack(self, message: Message) -> Tensor:
        if (whole := message.whole(self._world.device)) is not None:
            return whole
        buffer = self._room(message)
        for number, source, part in message.pieces(buffer):
            if source is None:
                part.copy_(self._passing[number])
            else:
                part.view(source.shape).copy_(source)
        return buffer

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        if message.whole(self._world.device) is not None:
            return
        for number, target, part in message.pieces(buffer):
            if target is None:
                self._passing[number] = part
            else:
                target.copy_(part.view(target.shape))


def _wait(handles: Sequence[dist.Work]) -> None:
    for handle in handles:
        handle.wait()


def _post(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(list(operations)) if operations else []
