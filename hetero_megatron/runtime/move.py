"""One rank's part of a switch: slices of its old buffers into its new ones, one message per device pair (paper §7).

What goes where is found before the switch. Old buffers are given back as soon as all of their slices have left, and
new ones made when the first slice is about to come.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.comm import BsrCopy, BsrTensor, BsrTransfer
from hetero_megatron.comm.boxes import numel
from hetero_megatron.comm.relay import Route, bytes_by_link
from hetero_megatron.runtime.slices import Slices, local_slices
from hetero_megatron.runtime.state import ParameterSlot, State, view
from hetero_megatron.runtime.world import World
from hetero_megatron.switch_plan import SwitchPlan
from hetero_megatron.switch_rounds import Round, Wave, plan_rounds

# Messages that a rank holds at a time, sent and received together; as much as the FP32 states of 90 million parameters.
MESSAGE_BYTES = 1 << 30
# What Adam keeps, by the suffix that a SwitchPlan gives it.
FLATS: Mapping[str, str] = {"": "master", "mean": "exp_avg", "variance": "exp_avg_sq"}
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
class _Place:
    """A slice of a shard in a flat buffer. The buffer has memory only now and then, so its view is made at need."""

    flat: Tensor
    slot: ParameterSlot
    slices: Slices

    def view(self) -> Tensor:
        return view(self.flat, self.slot)[self.slices]


@dataclass(frozen=True, slots=True)
class _Message:
    """Its pieces by transfer number: places in an old or a new buffer, or None for what this rank only passes on."""

    peer: int
    numbers: tuple[int, ...]
    places: tuple[_Place | None, ...]
    counts: tuple[int, ...]

    def whole(self, device: torch.device) -> Tensor | None:
        """The one contiguous piece that is the message: nothing to pack or unpack."""
        place = self.places[0] if len(self.places) == 1 else None
        if place is None or place.flat.device != device or not place.view().is_contiguous():
            return None
        return place.view().view(-1)

    def pieces(self, buffer: Tensor) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """(transfer, view, its part of the buffer) of every piece."""
        for number, place, part in zip(self.numbers, self.places, buffer.split(self.counts), strict=True):
            yield number, None if place is None else place.view(), part


@dataclass(frozen=True, slots=True)
class _Step:
    """A round on this rank: buffers to make, messages by wave (sends, receives), copies, buffers to give back."""

    hold: tuple[str, ...]
    copies: tuple[tuple[_Place, _Place], ...]
    waves: tuple[tuple[tuple[_Message, ...], tuple[_Message, ...]], ...]
    release: tuple[str, ...]


class Moves:
    """A SwitchPlan on this rank, from the buffers of one State to those of another; None on ranks without any."""

    def __init__(
        self,
        plan: SwitchPlan,
        world: World,
        before: State | None,
        after: State | None,
        message_bytes: int = MESSAGE_BYTES,
        routes: Sequence[Route] | None = None,
        acting: Mapping[int, int] | None = None,
        shadows: Mapping[int, State] | None = None,
    ) -> None:
        """Nothing is sent, no memory taken. `routes`: where the plan's transfers take a way over other ranks.

        `acting`: who sends in place of a rank that is gone, from a copy of its state; `shadows` are the copies that
        this rank has of ranks in whose place it acts. Not together with `routes`.
        """
        self._acting, self._shadows = dict(acting or {}), dict(shadows or {})
        self.plan, self.world = plan, world
        self._before, self._after = before, after
        self._scheme = plan.scheme()
        self._old = {slot.name: slot for slot in before.slots} if before else {}
        self._new = {slot.name: slot for slot in after.slots} if after else {}
        self._before_flats = before.flats if before else {}
        self._after_flats = after.flats if after else {}
        rounds = plan_rounds(self._scheme, message_bytes, routes)
        self.bytes_sent = bytes_by_link(self._scheme, plan.cluster, routes)
        kinds = [[_kind(tensor) for tensor in plan.tensors[slice(*each.tensors)]] for each in rounds]
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, names in enumerate(kinds):
            for name in names:
                first.setdefault(name, place)
                last[name] = place
        self._steps = tuple(
            _Step(
                tuple(name for name, at in first.items() if at == place),
                (*self._copies(each), *self._own_shadows(each)),
                tuple(self._wave(wave) for wave in each.waves),
                tuple(name for name, at in last.items() if at == place),
            )
            for place, each in enumerate(rounds)
        )
        self.kinds = tuple(first)

    def _copies(self, each: Round) -> Iterator[tuple[_Place, _Place]]:
        for number in each.copies:
            copy = self._scheme.copies[number]
            if copy.rank == self.world.rank:
                yield self._leaving(copy), self._coming(copy)

    def _wave(self, wave: Wave) -> tuple[tuple[_Message, ...], tuple[_Message, ...]]:
        rank = self.world.rank
        ends = [((self._actor(src), dst), parts) for (src, dst), parts in wave.items()]
        sends = tuple(self._message(dst, parts) for (src, dst), parts in ends if src == rank != dst)
        receives = tuple(self._message(src, parts) for (src, dst), parts in ends if dst == rank != src)
        return sends, receives

    def _actor(self, rank: int) -> int:
        """Who sends what `rank` is to send."""
        return self._acting.get(rank, rank)

    def _own_shadows(self, each: Round) -> Iterator[tuple[_Place, _Place]]:
        """What this rank has a copy of and needs itself."""
        for wave in each.waves:
            for (src, dst), numbers in wave.items():
                if src in self._shadows and dst == self.world.rank:
                    for number in numbers:
                        transfer = self._scheme.transfers[number]
                        yield self._leaving(transfer), self._coming(transfer)

    def _message(self, peer: int, numbers: Sequence[int]) -> _Message:
        transfers = [self._scheme.transfers[number] for number in numbers]
        places = [
            self._leaving(each)
            if self._actor(each.src) == self.world.rank
            else self._coming(each)
            if each.dst == self.world.rank
            else None
            for each in transfers
        ]
        counts = [numel(each.region, self.plan.tensors[each.tensor].shape) for each in transfers]
        return _Message(peer, tuple(numbers), tuple(places), tuple(counts))

    def _leaving(self, moved: BsrCopy | BsrTransfer) -> _Place:
        shadow = self._shadows.get(moved.src) if isinstance(moved, BsrTransfer) else None
        if shadow is not None:
            return self._place(shadow.flats, {slot.name: slot for slot in shadow.slots}, moved)
        return self._place(self._before_flats, self._old, moved)

    def _coming(self, moved: BsrCopy | BsrTransfer) -> _Place:
        return self._place(self._after_flats, self._new, moved)

    def _place(
        self, flats: Mapping[str, Tensor], slots: Mapping[str, ParameterSlot], moved: BsrCopy | BsrTransfer
    ) -> _Place:
        tensor = self.plan.tensors[moved.tensor]
        slot = slots[tensor.name.partition("@")[0]]
        return _Place(flats[_kind(tensor)], slot, local_slices(moved.region, slot.full_shape, slot.bounds))

    def run(self, keep: bool = False) -> Moved:
        """Collective over the ranks of both layouts; the new state is complete on return, but for its parameters.

        With `keep`, the old master weights and moments stay, so that a switch that fails can be begun again.
        """
        moved = Moved({}, dict.fromkeys(PHASES, 0.0))
        if self._before:
            self._before.release(*self._not_moved(self._before))
        for step in self._steps:
            if self._after:
                self._after.take(*step.hold)
            self._run(step, moved)
            if self._before and not keep:
                self._before.release(*step.release)
        if self._after:
            self._complete(self._after)
        return moved

    def _not_moved(self, state: State) -> list[str]:
        """Gradients, parameters where these are not the master weights, and moments that the optimizer does not use."""
        moved = [state.flats[kind] for kind in self.kinds]
        return [name for name, flat in state.flats.items() if not any(flat is other for other in moved)]

    def _complete(self, after: State) -> None:
        after.take(*after.flats)
        for name in set(after.moments) - set(self.kinds):
            after.moments[name].zero_()

    def _run(self, step: _Step, moved: Moved) -> None:
        passing: dict[int, Tensor] = {}
        copies = step.copies
        for sends, receives in step.waves or (((), ()),):
            at = time.perf_counter()
            landing = [(message, self._landing(message)) for message in receives]
            posted = [self._operation(dist.irecv, message.peer, buffer) for message, buffer in landing]
            together = self.world.device.type != "cpu"
            work = [] if together else _post(posted)
            for message in sends:
                buffer = self._pack(message, passing)
                moved.sent[message.peer] = moved.sent.get(message.peer, 0) + buffer.nbytes
                operation = self._operation(dist.isend, message.peer, buffer)
                # On a CPU a message leaves while the next one is packed; NCCL needs both directions in one batch.
                if together:
                    posted.append(operation)
                else:
                    work += _post([operation])
            if together:
                work = _post(posted)
            for source, target in copies:
                target.view().copy_(source.view())
            copies = ()
            at = moved.add("pack", at)
            # Every handle is waited for once: gloo would wait for a second message.
            arriving = [work] if together else [[handle] for handle in work[: len(landing)]]
            for number, (message, buffer) in enumerate(landing):
                for handle in arriving[number] if number < len(arriving) else ():
                    handle.wait()
                at = moved.add("move", at)
                self._unpack(message, buffer, passing)
                at = moved.add("unpack", at)
            for handle in work if together else work[len(landing) :]:
                handle.wait()
            moved.add("move", at)

    def _operation(self, kind: Callable[..., dist.Work | None], peer: int, buffer: Tensor) -> dist.P2POp:
        return dist.P2POp(kind, buffer, self.world.index(peer))

    def _landing(self, message: _Message) -> Tensor:
        whole = message.whole(self.world.device)
        return self._buffer(message) if whole is None else whole

    def _buffer(self, message: _Message) -> Tensor:
        return torch.empty(sum(message.counts), dtype=torch.float32, device=self.world.device)

    def _pack(self, message: _Message, passing: Mapping[int, Tensor]) -> Tensor:
        if (whole := message.whole(self.world.device)) is not None:
            return whole
        buffer = self._buffer(message)
        for number, source, part in message.pieces(buffer):
            if source is None:
                part.copy_(passing[number])
            else:
                part.view(source.shape).copy_(source)
        return buffer

    def _unpack(self, message: _Message, buffer: Tensor, passing: dict[int, Tensor]) -> None:
        if message.whole(self.world.device) is not None:
            return
        for number, target, part in message.pieces(buffer):
            if target is None:
                passing[number] = part
            else:
                target.copy_(part.view(target.shape))


def _kind(tensor: BsrTensor) -> str:
    return FLATS[tensor.name.partition("@")[2]]


def _post(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(list(operations)) if operations else []
