"""The ranks that share attention over the tokens of one pipeline stage, and what they send each other (Figure 4).

Parts may have different tensor-parallel degrees: every message holds the kv heads that its receiver works with.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.graph.nodes import Node
from hetero_megatron.program import Program
from hetero_megatron.runtime.clock import Clock
from hetero_megatron.runtime.world import World

KEYS_TAG, GRADIENTS_TAG = 1 << 20, (1 << 20) + 1
"""Pipeline messages have tags from 0 on, and no two ranks exchange both: these tell keys from gradients."""

Columns = tuple[int, int]
Messages = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True, slots=True)
class Route:
    """Columns of keys and values that `dst` gets from `src`, and whose gradients it gives back to it."""

    src: int
    dst: int
    columns: Columns


def routes(parts: Sequence[Sequence[tuple[int, Columns]]]) -> tuple[Route, ...]:
    """Between every two parts, one holder for every column that a rank works with.

    `parts` holds (rank, its columns of k and v) by part. Where a part has copies of the same columns (fewer kv
    heads than tensor-parallel ranks), receivers take turns at them, and each copy gets the gradients of its
    own receivers only: the reduction over copies adds them up.
    """
    found = []
    for at, receivers in enumerate(parts):
        for other, senders in enumerate(parts):
            if other == at:
                continue
            holders: dict[Columns, list[int]] = {}
            for rank, columns in senders:
                holders.setdefault(columns, []).append(rank)
            for place, (rank, (lo, hi)) in enumerate(receivers):
                for (first, end), held in sorted(holders.items()):
                    both = max(lo, first), min(hi, end)
                    if both[0] < both[1]:
                        found.append(Route(held[place % len(held)], rank, both))
    return tuple(found)


def looks_across_tokens(node: Node) -> bool:
    """Whether a layer's tokens look at one another: attention, whose second operand is what other parts send."""
    signature = node.signature
    return signature is not None and "t" in signature.indivisible and len(signature.operands) > 1


def columns_of(program: Program, value: str, ranks: Sequence[int]) -> list[tuple[int, Columns]]:
    """(rank, its columns) of an activation."""
    annotation = program.annotated.values[value]
    # Any token count will do: only the columns are read.
    shape = (annotation.hsize * len(annotation.ranks), program.annotated.graph.size(value, 1))
    return [(rank, annotation.region(rank).bounds(shape)[1]) for rank in ranks]


class Channel(Protocol):
    """How one rank talks to the ranks of the other parts."""

    def exchange(self, sends: Messages, receives: Messages, tag: int) -> Callable[[], None]:
        """Post messages (rank, contiguous tensor); what is returned waits until all have arrived and left."""

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give piece i to part i's rank of the same lane; returns the flat pieces of these sizes from them."""


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The own rank's place among the context-parallel parts of its stage.

    Attributes:
        mode: `ring` or `ulysses`.
        sends, receives: by part, (rank, own columns of k and v) of each message.
    """

    mode: str
    part: int
    sends: tuple[tuple[tuple[int, Columns], ...], ...]
    receives: tuple[tuple[tuple[int, Columns], ...], ...]
    channel: Channel

    @staticmethod
    def of(
        mode: str, rank: int, parts: Sequence[Sequence[tuple[int, Columns]]], channel: Channel
    ) -> "ContextGroup":
        """The group of `rank` among `parts`, which hold (rank, global columns of k and v)."""
        part, first = next(
            (number, columns[0])
            for number, own in enumerate(parts)
            for member, columns in own
            if member == rank
        )
        part_of = {member: number for number, own in enumerate(parts) for member, _ in own}
        sends: list[list[tuple[int, Columns]]] = [[] for _ in parts]
        receives: list[list[tuple[int, Columns]]] = [[] for _ in parts]
        for route in routes(parts):
            columns = route.columns[0] - first, route.columns[1] - first
            if route.src == rank:
                sends[part_of[route.dst]].append((route.dst, columns))
            elif route.dst == rank:
                receives[part_of[route.src]].append((route.src, columns))
        return ContextGroup(mode, part, tuple(map(tuple, sends)), tuple(map(tuple, receives)), channel)


class WorldChannel:
    """Messages over the world's connections, and all-to-all over a group of one rank per part."""

    def __init__(
        self, world: World, clock: Clock, lane: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._world, self._clock, self._group = world, clock, group
        # torch.distributed numbers a group's members by ascending rank, the parts come in their own order.
        self._order = sorted(range(len(lane)), key=lane.__getitem__)

    def exchange(self, sends: Messages, receives: Messages, tag: int) -> Callable[[], None]:
        """Post messages; nothing waits before the returned function is called."""
        at = time.perf_counter()
        posted = [dist.P2POp(dist.isend, x, self._world.index(rank), tag=tag) for rank, x in sends]
        posted += [dist.P2POp(dist.irecv, x, self._world.index(rank), tag=tag) for rank, x in receives]
        work = dist.batch_isend_irecv(posted) if posted else []
        self._clock.add("communication", at)

        def finish() -> None:
            at = time.perf_counter()
            for handle in work:
                handle.wait()
            posted.clear()  # the messages were kept until now
            self._clock.add("communication", at)

        return finish

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """One all-to-all of flat pieces."""
        assert self._group is not None, "all-to-all needs the process group of the lane"
        at = time.perf_counter()
        mine = torch.cat([pieces[part].reshape(-1) for part in self._order])
        arriving = [sizes[part] for part in self._order]
        theirs = mine.new_empty(sum(arriving))
        leaving = [pieces[part].numel() for part in self._order]
        dist.all_to_all_single(theirs, mine, arriving, leaving, group=self._group)
        found = dict(zip(self._order, theirs.split(arriving), strict=True))
        self._clock.add("communication", at)
        return [found[part] for part in range(len(sizes))]
