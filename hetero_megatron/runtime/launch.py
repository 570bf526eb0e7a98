"""Start ranks on this machine: forked from one process that has imported torch, joined over a file.

A forked rank costs milliseconds, a spawned one seconds. Ranks run under SCHED_BATCH, without which gloo's
event loop burns whole scheduler slices when cores are shared.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from hetero_megatron.errors import HeteroError
from hetero_megatron.runtime.stopping import StopRequest

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 3.0
# How gloo words the end of a peer.
_LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")
_PEERS = ("gloo/", "Gloo ", "NCCL", *_LOST, "Timed out waiting", "timed out")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a process finds its peers: its index among them, their number, and the file they share."""

    index: int
    size: int
    store_path: str


def preload(recompute: bool) -> None:
    """Import once what the first backward pass, or the first recomputed layer, would import in every forked rank.

    That is half a second of CPU time and 70 MB of memory a rank, and a second and 120 MB where layers recompute.
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if recompute:
        importlib.import_module("torch._dynamo")


def fork_ranks(
    count: int,
    main: Callable[[Rendezvous], None],
    timeout_s: float | None = None,
    ranks: Sequence[int] | None = None,
    request: StopRequest | None = None,
) -> int:
    """Run `main` in `count` forked processes and return 0 when all of them succeed.

    `ranks` are their global ranks, ascending, by which messages name them; 0, 1, ... where they are not given.
    When one fails, the others get a few seconds to fail by themselves with their own message and are then
    killed; none is left behind. The children end when this process ends. With a `request`, to which this process
    listens, a signal that asks it to stop goes on to the ranks.

    Returns:
        The exit code of the first process that failed (128 + signal when it was killed), 124 on time-out, else 0.
    """
    ranks = range(count) if ranks is None else sorted(ranks)
    assert len(ranks) == count, f"{count} processes cannot be called by {len(ranks)} ranks"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="hetero-megatron-") as folder:
        store = str(Path(folder) / "store")
        pids: list[int] = []
        try:
            for index, rank in enumerate(ranks):
                with interrupts_wait() as resume:
                    pids.append(fork_one(partial(main, Rendezvous(index, count, store)), rank, resume))
            return _reap(pids, ranks, timeout_s, request)
        finally:
            kill_all(pids)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[Callable[[], None]]:
    """An interrupt that comes inside is raised at its end, or when the function that is given has run.

    Between a fork and the note of its process id, an exception would leave a rank behind. Blocking the signal would
    not do: another thread could still take it, and Python raises it in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield _nothing  # only the main thread is interrupted, and only by a handler of Python's
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))

    def resume() -> None:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            waiting.clear()
            signal.raise_signal(signal.SIGINT)

    try:
        yield resume
    finally:
        resume()


def _nothing() -> None:
    """No interrupt was held back."""


def fork_one(main: Callable[[], None], rank: int, resume: Callable[[], None]) -> int:
    """Process id of a rank that runs `main`; `resume` is called in it when it can be interrupted."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with_parent(parent)
        use_batch_scheduling()
        with end_at_once(rank):
            resume()
            main()
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


def end_with_parent(parent: int) -> None:
    """This forked process is killed when process `parent` ends, also when that has already happened."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def end_at_once(rank: int) -> Iterator[None]:
    """Whatever fails inside is reported and ends this process, global `rank`: 1, or 130 when it was interrupted.

    An ordinary exit waits for ever for a message that is under way between this process and a peer, and
    whoever started the ranks would not learn that one has failed.
    """
    try:
        yield
    except BaseException as error:
        try:
            if not isinstance(error, KeyboardInterrupt):
                # In one piece: several ranks often say the same at the same time.
                sys.stderr.write(told(error, rank) + "\n")
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def use_batch_scheduling() -> None:
    """Ask for SCHED_BATCH where the system has it; threads started later inherit it."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def is_lost_connection(error: BaseException) -> bool:
    """Whether an operation with other ranks failed because one of them has ended."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo/transport" in text and any(end in text for end in _LOST)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an operation failed because of its other end, its connection, or a wait for it that took too long."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _PEERS)


def told(error: BaseException, rank: int) -> str:
    """What a person reads of a failure: a refusal or a lost peer in one line, a defect with its traceback."""
    if isinstance(error, HeteroError):
        return f"error: {error}"
    if is_lost_connection(error):
        return f"error: rank {rank} has lost its connection to another one, which has ended"
    return f"rank {rank} failed:\n{traceback.format_exc()}"


def _reap(
    pids: Sequence[int], ranks: Sequence[int], timeout_s: float | None, request: StopRequest | None
) -> int:
    """Wait for all; the first failure shortens the wait for the rest to a grace period."""
    alive, code, passed_on = set(pids), 0, False
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while alive:
        for pid, ended in ended_of(alive):
            alive.discard(pid)
            if ended and not code:
                code = 128 - ended if ended < 0 else ended
                if ended < 0:
                    print(killed_text(ranks[pids.index(pid)], -ended), file=sys.stderr, flush=True)
                grace = time.monotonic() + _GRACE_SECONDS
                deadline = grace if deadline is None else min(deadline, grace)
        if deadline is not None and time.monotonic() > deadline:
            return code or 124
        if request and not passed_on:
            passed_on = True
            for pid in alive:
                os.kill(pid, signal.SIGTERM)
        if alive:
            time.sleep(0.002)
    return code


def ended_of(alive: Collection[int]) -> list[tuple[int, int]]:
    """Who has just ended, with exit codes; killed ones first, because the others may have failed for want of them."""
    found: dict[int, int] = {}
    for _ in range(2):  # who was looked at before being killed is seen the second time
        for pid in alive:
            if pid not in found:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found[pid] = os.waitstatus_to_exitcode(status)
        if not any(found.values()):
            break
    return sorted(found.items(), key=lambda each: each[1] >= 0)


def killed_text(rank: int, number: int) -> str:
    """What is said of a rank that signal `number` has ended."""
    why = ": by someone, or by the system because memory ran out" if number == signal.SIGKILL else ""
    return f"error: rank {rank} was killed by {signal.Signals(number).name}{why}"


def kill_all(pids: Sequence[int]) -> None:
    """All at once, before one of them reports that another is gone; none is left, not even as a zombie."""
    alive = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            done, _ = os.waitpid(pid, os.WNOHANG)
            if not done:
                os.kill(pid, signal.SIGKILL)
                alive.append(pid)
    for pid in alive:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
