"""Context-parallel ranks as threads of one process, with mailboxes for connections."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from hetero_megatron.runtime.context_group import Columns, ContextGroup, Messages

Result = TypeVar("Result")
WAIT_S = 20
Boxes = dict[tuple[int, int, int], "Queue[Tensor]"]


@dataclass
class Mail:
    """Messages in order by (sender, receiver, tag), and how many elements were sent."""

    boxes: Boxes = field(default_factory=lambda: defaultdict(Queue))
    lock: threading.Lock = field(default_factory=threading.Lock)
    elements: dict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def box(self, source: int, to: int, tag: int) -> "Queue[Tensor]":
        with self.lock:
            return self.boxes[source, to, tag]


@dataclass(frozen=True)
class MailChannel:
    """A Channel of `rank`; `lane` has the ranks of its place in every part."""

    mail: Mail
    rank: int
    lane: tuple[int, ...]

    def exchange(self, sends: Messages, receives: Messages, tag: int) -> Callable[[], None]:
        for to, message in sends:
            assert message.is_contiguous()
            self.mail.elements[self.rank, to, tag] += message.numel()
            self.mail.box(self.rank, to, tag).put(message.clone())

        def finish() -> None:
            for source, buffer in receives:
                arrived = self.mail.box(source, self.rank, tag).get(timeout=WAIT_S)
                assert arrived.shape == buffer.shape
                buffer.copy_(arrived)

        return finish

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        for to, piece in zip(self.lane, pieces, strict=True):
            self.mail.box(self.rank, to, -1).put(piece.reshape(-1).clone())
        found = [self.mail.box(source, self.rank, -1).get(timeout=WAIT_S) for source in self.lane]
        assert [x.numel() for x in found] == list(sizes)
        return found


def groups(mode: str, parts: Sequence[Sequence[tuple[int, Columns]]], mail: Mail) -> dict[int, ContextGroup]:
    """The ContextGroup of every rank."""
    lanes = list(zip(*parts, strict=mode == "ulysses"))
    found = {}
    for part in parts:
        for place, (rank, _) in enumerate(part):
            lane = tuple(member for member, _ in lanes[place]) if mode == "ulysses" else ()
            found[rank] = ContextGroup.of(mode, rank, parts, MailChannel(mail, rank, lane))
    return found


def on_all(ranks: Sequence[int], work: Callable[[int], Result]) -> dict[int, Result]:
    """`work(rank)` at the same time on every rank."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(work, ranks), strict=True))
