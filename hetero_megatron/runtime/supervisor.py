"""The process that watches over the ranks of a node: it starts them, notices their ends, and lets the others go on.

The supervisor of the first node also hosts the store and makes the views. It is no rank: what ranks lose when one of
them ends is never the place where they meet again. When a supervisor ends, so do its ranks.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.board import Board
from hetero_megatron.runtime.launch import ended_of, fork_one, interrupts_wait, kill_all
from hetero_megatron.runtime.membership import Coordinator, Member, connect, tell
from hetero_megatron.runtime.stopping import StopRequest

_POLL_SECONDS = 0.002
_GRACE_SECONDS = 3.0
_BEAT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """How long what may take.

    Attributes:
        heartbeat_s: without a sign of life of a process.
        phase_s: of a rank in one place of a step, such as a forward pass.
        stop_s: from the first failure of a generation until every rank has noticed it.
    """

    heartbeat_s: float = 3.0
    phase_s: float = 600.0
    stop_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Node:
    """Which of the nodes this is, its ranks, and where node 0 listens; port 0 is any free one, of a single node.

    `nodes` has the ranks of all nodes, `present` the number of those that the run begins with; others come later.
    """

    ranks: tuple[int, ...]
    number: int = 0
    nodes: Mapping[int, tuple[int, ...]] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    present: int = 1

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The ranks of the nodes that the run begins with."""
        if self.nodes is None:
            return self.ranks
        first = [ranks for number, ranks in self.nodes.items() if number < self.present]
        return tuple(sorted(rank for ranks in first for rank in ranks))


class Supervisor:
    """Ranks of one node and what is known of them."""

    def __init__(
        self,
        node: Node,
        main: Callable[[Member], None],
        limits: Limits | None = None,
        request: StopRequest | None = None,
        returning: bool = False,
    ) -> None:
        """`main` is the life of a rank. With `returning`, a rank that is lost is started anew and taken in again."""
        self.node, self._main, self._limits, self._request = node, main, limits or Limits(), request
        self._returning = returning
        self._board = Board(len(node.ranks))
        self._pids: dict[int, int] = {}
        self._why: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._heard = 0.0
        self._coordinator: Coordinator | None = None
        self._store: dist.TCPStore
        self._address = (node.host, node.port)

    def run(self, timeout_s: float | None = None) -> int:
        """Start the ranks and watch until all have ended.

        Returns:
            0 when those that were not lost have ended well; 1 when the run was given up; 124 on time-out.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with self._listening() as handle:
                for rank in self.node.ranks:
                    self._start(rank)
                self._open_store(handle)
            code = self._watch(None if timeout_s is None else time.monotonic() + timeout_s)
            self._part()
            return code
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RuntimeFailure(
                f"node {self.node.number} has lost the store at {self.node.host}:{self._address[1]}: the supervisor of "
                "node 0 has ended, and the run with it; its last checkpoint is whole"
            ) from error
        finally:
            kill_all(list(self._pids.values()))

    def _part(self) -> None:
        """The first node keeps the store until the others have done with it."""
        if self.node.number:
            self._store.set(f"left/{self.node.number}", "")
            return
        there = [
            f"left/{number}"
            for number, ranks in (self.node.nodes or {}).items()
            if number and set(ranks) & set(self._coordinator.view.ranks if self._coordinator else ())
        ]
        deadline = time.monotonic() + _GRACE_SECONDS
        while there and not self._store.check(there) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket | None]:
        """The store's socket, bound before the ranks exist, so that none of them can come too early."""
        if self.node.number:
            yield None
            return
        with socket.socket() as handle:
            try:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                handle.bind(("" if self.node.nodes else self.node.host, self.node.port))
            except OSError as error:
                raise RuntimeFailure(
                    f"port {self.node.port} of this node is taken ({error.strerror}); choose another endpoint"
                ) from error
            handle.listen(1024)
            self._address = (self.node.host, handle.getsockname()[1])
            yield handle

    def _open_store(self, handle: socket.socket | None) -> None:
        host, port = self._address
        if handle is None:
            self._store = connect(host, port)
            self._announce()
            return
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=handle.detach(),
            timeout=timedelta(seconds=60),
        )
        self._coordinator = Coordinator(self._store, self.node.first_ranks)

    def _announce(self) -> None:
        """A node that starts when the others are at work asks to be taken in."""
        while not self._store.check(["view/0"]):
            time.sleep(_POLL_SECONDS)
        if not self._store.check([f"enter/{rank}" for rank in self.node.ranks]):
            self._store.set(f"announce/{self.node.number}", "")
            tell(self._store)

    def _start(self, rank: int) -> None:
        place = self.node.ranks.index(rank)
        self._board.clear(place)
        member = Member(rank, self._address, self._board, place)
        with interrupts_wait() as resume:
            self._pids[rank] = fork_one(partial(self._main, member), rank, resume)

    def _watch(self, deadline: float | None) -> int:
        passed_on, refused, beat = False, False, 0.0
        while self._pids:
            self._reap()
            self._check_signs()
            if self.node.number and time.monotonic() - beat > _BEAT_SECONDS:
                beat = time.monotonic()
                self._store.add(f"beat/{self.node.number}", 1)
            if self._coordinator is not None:
                self._coordinate(self._coordinator)
            if self._request and not passed_on:
                passed_on = True
                self._signal(signal.SIGTERM)
            now = time.monotonic()
            if not refused and self._store.check(["refused"]):
                refused = True
                deadline = now + _GRACE_SECONDS if deadline is None else min(deadline, now + _GRACE_SECONDS)
            if deadline is not None and now > deadline:
                return 1 if refused else 124
            time.sleep(_POLL_SECONDS)
        self._reap()
        return 0 if self._store.check(["trained"]) and not refused else 1

    def _signal(self, number: int) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        ranks = {pid: rank for rank, pid in self._pids.items()}
        for pid, code in ended_of(list(ranks)):
            rank = ranks[pid]
            del self._pids[rank]
            if code == 0:
                continue
            note = self._board.read(self.node.ranks.index(rank))
            why = (
                f"rank {rank} was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"rank {rank} has failed"
            )
            self._lose(rank, f"{self._why.pop(rank, why)} {note}")

    def _lose(self, rank: int, why: str) -> None:
        self._lost[rank] = why
        if self._store.check(["trained"]) or self._store.check(["refused"]):
            return
        print(f"{why} (noticed by the supervisor of node {self.node.number})", file=sys.stderr, flush=True)
        if self._coordinator is not None:
            self._coordinator.lost(rank, why)
        else:
            self._store.set(f"gone/{rank}", why)
            tell(self._store)

    def _check_signs(self) -> None:
        """End ranks that show no sign of life, or stay in one place for too long."""
        now = time.monotonic()
        for rank, pid in self._pids.items():
            if rank in self._why:
                continue
            note = self._board.read(self.node.ranks.index(rank))
            if note.phase == "starting":
                continue
            if now - note.beat > self._limits.heartbeat_s:
                self._end(rank, pid, f"rank {rank} has shown no sign of life for {now - note.beat:.1f} s")
            elif now - note.since > self._limits.phase_s and note.phase != "waiting for work":
                self._end(rank, pid, f"rank {rank} has come no further for {now - note.since:.1f} s")

    def _end(self, rank: int, pid: int, why: str) -> None:
        self._why[rank] = f"{why}, was ended"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _coordinate(self, coordinator: Coordinator) -> None:
        self._hear_of_other_nodes(coordinator)
        view = coordinator.poll()
        if view is not None:
            if self._returning and view.lost:
                self._return(coordinator, [rank for rank in view.lost if rank in self.node.ranks])
            return
        if coordinator.halted_at and time.time() - coordinator.halted_at > self._limits.stop_s:
            for rank in coordinator.waiting_for():
                if rank in self._pids and rank not in self._why:
                    waited = time.time() - coordinator.halted_at
                    self._end(
                        rank, self._pids[rank], f"rank {rank} has not noticed a failure for {waited:.0f} s"
                    )

    def _return(self, coordinator: Coordinator, ranks: Sequence[int]) -> None:
        """Start lost ranks anew; they are taken in at a step boundary."""
        again = [rank for rank in ranks if rank not in self._pids]
        if not again:
            return
        print(f"rank {ranges_text(again)} is started anew and will join", file=sys.stderr, flush=True)
        # Taken in before it is there: it waits for the view that has it.
        for rank in again:
            self._store.set(f"enter/{rank}", str(coordinator.view.generation + 1))
            self._start(rank)
        coordinator.join(again)

    def _hear_of_other_nodes(self, coordinator: Coordinator) -> None:
        """What other supervisors have noticed, and which of them are silent."""
        if self.node.nodes is None:
            return
        now = time.monotonic()
        if now - self._heard < _BEAT_SECONDS / 10:
            return
        self._heard = now
        for number, ranks in self.node.nodes.items():
            if number == self.node.number:
                continue
            if self._store.check([f"announce/{number}"]):
                self._store.delete_key(f"announce/{number}")
                coordinator.join(ranks)
            beats = self._store.add(f"beat/{number}", 0)
            if number not in self._beats or beats != self._beats[number][0]:
                self._beats[number] = (beats, now)
            silent = now - self._beats[number][1]
            for rank in ranks:
                if rank not in coordinator.view.ranks:
                    continue
                if self._store.check([f"gone/{rank}"]):
                    coordinator.lost(rank, self._store.get(f"gone/{rank}").decode())
                    self._store.delete_key(f"gone/{rank}")
                elif beats and silent > self._limits.heartbeat_s:
                    coordinator.lost(
                        rank, f"node {number} with rank {rank} has been silent for {silent:.1f} s"
                    )
