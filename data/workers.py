"""Processes that work ahead of the rank that forked them (DESIGN §6, documents to micro-batches).

What a worker makes crosses in a memory file, whose descriptor it sends: the rank copies it out when it wants it, and
no thread is needed to empty a pipe. A worker ends with its rank, leaves signals to it, and is never left a zombie.
"""

import contextlib
import mmap
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from hetero_megatron.errors import DataError, HeteroError
from hetero_megatron.runtime.launch import end_with_parent

_ITEM, _REFUSED, _FAILED, _END, _WANTED = b"i", b"r", b"f", b"e", b"w"
# A scheduler sends them to the whole process group; the rank decides what they mean.
_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM)


class Worker:
    """A forked process that makes the items of an iterator, at most `prefetch` more than were taken.

    `others` are earlier workers, whose connections the new process must not hold open.
    """

    def __init__(
        self, name: str, items: Iterator[Any], prefetch: int, others: Sequence["Worker"] = ()
    ) -> None:
        """Fork."""
        self.name = name
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        # Between the fork and the new process's own setting, a signal would run the rank's handler in both.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
        try:
            self.pid = os.fork()
            if not self.pid:
                foreign = [self._socket, *(other._socket for other in others)]
                _work(parent, items, prefetch, theirs, foreign)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._ended = False

    def take(self, what: str) -> Any:
        """The next item, or None at the end; waits for it. `what` it is, is said when it does not come.

        Raises:
            DataError: the worker was refused its data, failed, or was killed.
        """
        if self._ended:
            return None
        try:
            kind, files, *_ = socket.recv_fds(self._socket, 1, 1)
        except ConnectionError:
            kind, files = b"", []
        content = _read(files[0]) if files else None
        if kind == _ITEM:
            with contextlib.suppress(OSError):  # one that has made its last item no longer listens
                self._socket.send(_WANTED)
            return content
        self._ended = True
        if kind == _END:
            return None
        if kind == _REFUSED:
            raise DataError(str(content))
        if kind == _FAILED:
            raise DataError(f"{self.name} failed while it prepared {what}:\n{content}")
        raise DataError(f"{self.name} (process {self.pid}) {self._how_it_ended()}; it was to prepare {what}")

    def close(self) -> None:
        """End the process, if it has not ended, and wait for it."""
        self._ended = True
        self._socket.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0

    def _how_it_ended(self) -> str:
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return "has ended"
        self.pid, code = 0, os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"has ended with exit code {code}"
        why = ", by someone or by the system because memory ran out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{why}"


def _work(
    parent: int, items: Iterator[Any], prefetch: int, connection: socket.socket, foreign: list[socket.socket]
) -> None:
    """The forked process; does not return."""
    try:
        end_with_parent(parent)
        for number in _LEFT_TO_THE_RANK:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)
        for each in foreign:
            each.close()
        with contextlib.suppress(ConnectionError):
            _serve(items, prefetch, connection)
    finally:
        os._exit(0)


def _serve(items: Iterator[Any], prefetch: int, connection: socket.socket) -> None:
    try:
        ahead = 0
        for item in items:
            _send(connection, _ITEM, item)
            ahead += 1
            if ahead > prefetch - 1:
                if not connection.recv(1):
                    return
                ahead -= 1
        connection.send(_END)
    except ConnectionError:
        raise
    except HeteroError as error:
        _send(connection, _REFUSED, str(error))
    except BaseException:
        _send(connection, _FAILED, traceback.format_exc())


def _send(connection: socket.socket, kind: bytes, content: Any) -> None:
    with _memory_file() as file:
        pickle.dump(content, file, protocol=5)
        file.flush()
        socket.send_fds(connection, [kind], [file.fileno()])


def _memory_file() -> Any:
    """A file without a name, in memory where the system has such files."""
    with contextlib.suppress(AttributeError, OSError):
        return open(os.memfd_create("prepared step"), "w+b")
    return tempfile.TemporaryFile()


def _read(descriptor: int) -> Any:
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
            return pickle.loads(memory)
    finally:
        os.close(descriptor)
