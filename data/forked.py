"""Numbered tasks shared among forked processes, which end with this one (paper §8, data)."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from hetero_megatron.errors import DataError
from hetero_megatron.runtime.launch import end_with_parent

Report: TypeAlias = Callable[[object], None]
Work: TypeAlias = Callable[[int, Report], object]


def run_forked(tasks: list[int], work: Work, workers: int) -> Iterator[tuple[int, bool, Any]]:
    """Yield (task, whether it has ended, its report or result) as they come; tasks are handed out in order.

    `work(task, report)` runs in a process that was forked here and sees this one's values as they are now. When a task
    is refused, no further one is begun, and the refusal of the first refused one is raised once all before it are done,
    so that it is the same for every number of workers.

    Raises:
        DataError: a task was refused, or a process was killed.
    """
    left = list(reversed(tasks))
    busy: dict[Connection, int] = {}
    processes: dict[Connection, BaseProcess] = {}
    refused: dict[int, BaseException] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            connection, process = _fork(work)
            processes[connection] = process
            busy[connection] = left.pop()
            connection.send(busy[connection])
        while any(not refused or task < min(refused) for task in busy.values()):
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                task = busy[ready]
                try:
                    kind, value = ready.recv()
                except (EOFError, OSError):
                    processes[ready].join()
                    raise DataError(_killed(processes[ready].exitcode)) from None
                if kind == "report":
                    yield task, False, value
                    continue
                del busy[ready]
                if kind == "refused":
                    refused[task] = value
                else:
                    yield task, True, value
                if left and not refused:
                    busy[ready] = left.pop()
                    ready.send(busy[ready])
        if refused:
            raise refused[min(refused)]
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
            process.join()


def _fork(work: Work) -> tuple[Connection, BaseProcess]:
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, work, parent), daemon=True)
    process.start()
    there.close()
    return here, process


def _serve(connection: Connection, work: Work, parent: int) -> None:
    """Do what is sent until the other end is gone; an interrupt is the parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                result = work(task, lambda value: connection.send(("report", value)))
            except DataError as error:
                connection.send(("refused", error))
            else:
                connection.send(("done", result))


def _killed(code: int | None) -> str:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return (
        f"a process that turns text into tokens {how}; if the machine ran out of memory, use fewer workers. "
        "Finished parts are kept: the same command goes on from them"
    )
