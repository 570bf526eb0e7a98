"""One rank's part of a switch: slices of its old buffers into its new ones, one message per device pair (paper §7).

What goes where is found before the switch. Old buffers are given back as soon as all of their slices have left, and
new ones made when the first slice is about to come.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_megatron.comm import BsrCopy, BsrTensor, BsrTransfer
from hetero_megatron.comm.boxes import numel
from hetero_megatron.comm.relay import Route, bytes_by_link
from hetero_megatron.runtime import message
from hetero_megatron.runtime.message import PHASES, Arena, Message, Moved, Place, Transit
from hetero_megatron.runtime.slices import local_slices
from hetero_megatron.runtime.state import ParameterSlot, State
from hetero_megatron.runtime.world import World
from hetero_megatron.switch_plan import SwitchPlan
from hetero_megatron.switch_rounds import Round, Wave, plan_rounds

# Messages of a round on one rank, sent and received together. Two rounds are on their way at a time: large enough for
# full bandwidth, small enough that memory is used again while it is in reach.
MESSAGE_BYTES = 64 << 20
# What Adam keeps, by the suffix that a SwitchPlan gives it.
FLATS: Mapping[str, str] = {"": "master", "mean": "exp_avg", "variance": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class _Step:
    """A round on this rank: buffers to make, copies, messages by wave, buffers to give back."""

    hold: tuple[str, ...]
    copies: tuple[tuple[Place, Place], ...]
    waves: tuple[message.Wave, ...]
    release: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Of all messages."""
        return sum(sum(each.counts) for sends, receives in self.waves for each in (*sends, *receives))


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
        names = [tensor.name.partition("@")[0] for tensor in plan.tensors]
        first_of = {name: place for place, name in reversed(list(enumerate(names)))}
        kind_of = {kind: place for place, kind in enumerate(FLATS.values())}
        self._order = [
            (kind_of[_kind(tensor)], first_of[name]) for tensor, name in zip(plan.tensors, names, strict=True)
        ]
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

    def _copies(self, each: Round) -> Iterator[tuple[Place, Place]]:
        for number in each.copies:
            copy = self._scheme.copies[number]
            if copy.rank == self.world.rank:
                yield self._leaving(copy), self._coming(copy)

    def _wave(self, wave: Wave) -> message.Wave:
        rank = self.world.rank
        ends = [((self._actor(src), dst), parts) for (src, dst), parts in wave.items()]
        sends = tuple(self._message(dst, parts) for (src, dst), parts in ends if src == rank != dst)
        receives = tuple(self._message(src, parts) for (src, dst), parts in ends if dst == rank != src)
        return sends, receives

    def _actor(self, rank: int) -> int:
        """Who sends what `rank` is to send."""
        return self._acting.get(rank, rank)

    def _own_shadows(self, each: Round) -> Iterator[tuple[Place, Place]]:
        """What this rank has a copy of and needs itself."""
        for wave in each.waves:
            for (src, dst), numbers in wave.items():
                if src in self._shadows and dst == self.world.rank:
                    for number in numbers:
                        transfer = self._scheme.transfers[number]
                        yield self._leaving(transfer), self._coming(transfer)

    def _message(self, peer: int, numbers: Sequence[int]) -> Message:
        # Moments were planned in reverse; in the parameters' order more slices follow one another in memory.
        numbers = sorted(numbers, key=lambda each: self._order[self._scheme.transfers[each].tensor])
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
        return Message.of(peer, numbers, places, counts)

    def _leaving(self, moved: BsrCopy | BsrTransfer) -> Place:
        shadow = self._shadows.get(moved.src) if isinstance(moved, BsrTransfer) else None
        if shadow is not None:
            return self._place(shadow.flats, {slot.name: slot for slot in shadow.slots}, moved)
        return self._place(self._before_flats, self._old, moved)

    def _coming(self, moved: BsrCopy | BsrTransfer) -> Place:
        return self._place(self._after_flats, self._new, moved)

    def _place(
        self, flats: Mapping[str, Tensor], slots: Mapping[str, ParameterSlot], moved: BsrCopy | BsrTransfer
    ) -> Place:
        tensor = self.plan.tensors[moved.tensor]
        slot = slots[tensor.name.partition("@")[0]]
        return Place(flats[_kind(tensor)], slot, local_slices(moved.region, slot.full_shape, slot.bounds))

    def run(self, keep: bool = False, amid: Callable[[], None] | None = None) -> Moved:
        """Collective over the ranks of both layouts; the new state is complete on return, but for its parameters.

        With `keep`, the old master weights and moments stay, so that a switch that fails can be begun again. `amid` is
        called once, when the messages of the first round are under way.
        """
        moved = Moved({}, dict.fromkeys(PHASES, 0.0))
        arenas = self._arenas()
        if self._before:
            self._before.release(*self._not_moved(self._before))
        # A round is packed and sent while the one before it arrives.
        pending: tuple[Transit, tuple[str, ...]] | None = None
        for number, step in enumerate(self._steps):
            if self._after:
                self._after.take(*step.hold)
            arena, passing = arenas[number % len(arenas)], dict[int, Tensor]()
            arena.empty()
            copies = step.copies
            for place, wave in enumerate(step.waves or (((), ()),)):
                if place:
                    self._end(pending, keep)
                    pending = None
                transit = Transit(wave, copies, self.world, arena, passing, moved)
                copies = ()
                if amid is not None and not number and not place:
                    amid()
                self._end(pending, keep)
                last = place >= len(step.waves) - 1
                pending = transit, step.release if last else ()
        self._end(pending, keep)
        if self._after:
            self._complete(self._after)
        return moved

    def _arenas(self) -> list[Arena]:
        """Memory for the largest round, and once more where there are several."""
        largest = max((step.elements for step in self._steps), default=0)
        return [Arena(largest, self.world.device) for _ in self._steps[:2]]

    def _end(self, pending: tuple[Transit, tuple[str, ...]] | None, keep: bool) -> None:
        if pending is None:
            return
        transit, release = pending
        transit.end()
        if self._before and not keep:
            self._before.release(*release)

    def _not_moved(self, state: State) -> list[str]:
        """Gradients, parameters where these are not the master weights, and moments that the optimizer does not use."""
        moved = [state.flats[kind] for kind in self.kinds]
        return [name for name, flat in state.flats.items() if not any(flat is other for other in moved)]

    def _complete(self, after: State) -> None:
        after.take(*after.flats)
        for name in set(after.moments) - set(self.kinds):
            after.moments[name].zero_()


def _kind(tensor: BsrTensor) -> str:
    return FLATS[tensor.name.partition("@")[2]]
