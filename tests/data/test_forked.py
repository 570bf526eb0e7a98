"""Tasks shared among processes."""

import os
import signal
import time

import pytest

from hetero_megatron.data.forked import Report, run_forked
from hetero_megatron.errors import DataError


def test_every_task_is_done_once_with_what_it_reported() -> None:
    def work(task: int, report: Report) -> int:
        report(f"at {task}")
        return task * task

    found = list(run_forked(list(range(20)), work, 3))
    assert sorted((task, value) for task, ended, value in found if ended) == [(n, n * n) for n in range(20)]
    assert sorted(task for task, ended, value in found if not ended and value == f"at {task}") == list(
        range(20)
    )


def test_without_tasks_no_process_is_started() -> None:
    assert list(run_forked([], lambda task, report: os.abort(), 2)) == []


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_refused_task_is_told_whoever_refuses_first(workers: int) -> None:
    def work(task: int, report: Report) -> int:
        if task == 2:
            time.sleep(0.05)  # the later one is refused earlier
        if task in (2, 3):
            raise DataError(f"task {task}")
        return task

    with pytest.raises(DataError, match="^task 2$"):
        list(run_forked(list(range(50)), work, workers))


def test_after_a_refusal_no_further_task_is_begun() -> None:
    def work(task: int, report: Report) -> int:
        report("begun")
        raise DataError("no")

    begun: list[int] = []
    with pytest.raises(DataError, match="^no$"):
        begun.extend(task for task, _, _ in run_forked(list(range(50)), work, 1))
    assert len(begun) <= 1


def test_a_process_that_is_killed_is_told_with_the_remedy() -> None:
    def work(task: int, report: Report) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(
        DataError, match="was killed by signal 9; if the machine ran out of memory, use fewer workers"
    ):
        list(run_forked([0], work, 1))


def test_a_process_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def work(task: int, report: Report) -> int:
        raise KeyError("a defect")

    with pytest.raises(DataError, match=r"a process that turns text into tokens ended with exit code 1"):
        list(run_forked([0], work, 1))
    assert "a defect" in capfd.readouterr().err


def test_no_process_is_left_when_nobody_waits_for_the_rest() -> None:
    def work(task: int, report: Report) -> int:
        report(os.getpid())
        time.sleep(60)
        return task

    found = run_forked([0, 1], work, 2)
    pids = [next(found)[2], next(found)[2]]
    found.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
