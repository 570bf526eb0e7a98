"""Starting ranks on this machine: exit codes, and no process that outlives its run."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime import launch
from hetero_megatron.runtime.launch import Rendezvous, end_at_once, fork_ranks
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import RanksFailed, run_ranks

NEVER = 60.0


@pytest.fixture
def pid_files(tmp_path: Path) -> Path:
    """Where ranks leave their process ids."""
    return tmp_path


def noted(folder: Path, work: Callable[[int], None]) -> Callable[[Rendezvous], None]:
    """`work(index)` in a rank that first leaves its process id in `folder`."""

    def main(rendezvous: Rendezvous) -> None:
        (folder / f"{rendezvous.index}.part").write_text(str(os.getpid()))
        (folder / f"{rendezvous.index}.part").rename(folder / f"{rendezvous.index}.pid")
        work(rendezvous.index)

    return main


def pids(folder: Path, count: int) -> list[int]:
    """Waits until `count` ranks have left their process ids."""
    deadline = time.monotonic() + 10
    while len(files := sorted(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, f"only {len(files)} of {count} ranks have started"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def gone(pid: int, within_s: float = 2.0) -> bool:
    """Whether there is no such process, or only a zombie that nobody can reap but its parent."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_success_of_all_ranks_is_exit_code_0_and_each_has_its_own_index(pid_files: Path) -> None:
    def main(rendezvous: Rendezvous) -> None:
        assert rendezvous.size == 3
        (pid_files / str(rendezvous.index)).write_text(rendezvous.store_path)

    assert fork_ranks(3, main, 10) == 0
    stores = {(pid_files / str(index)).read_text() for index in range(3)}
    assert len(stores) == 1
    assert not Path(stores.pop()).parent.exists(), "the rendezvous folder outlives the run"


def test_a_refusal_of_the_library_is_one_line_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def main(rendezvous: Rendezvous) -> None:
        raise RuntimeFailure("rank 0 has 3, rank 1 has 2")

    assert fork_ranks(1, main, 10) == 1
    assert capfd.readouterr().err == "error: rank 0 has 3, rank 1 has 2\n"


def test_a_defect_names_the_rank_and_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def main(rendezvous: Rendezvous) -> None:
        if rendezvous.index == 1:
            raise KeyError("weights")

    assert fork_ranks(2, main, 10) == 1
    told = capfd.readouterr().err
    assert told.startswith("rank 1 failed:\nTraceback")
    assert "KeyError: 'weights'" in told


def test_messages_name_global_ranks_not_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is idle, so process 1 is rank 2."""

    def raises(rendezvous: Rendezvous) -> None:
        if rendezvous.index == 1:
            raise KeyError("weights")

    def dies(rendezvous: Rendezvous) -> None:
        if rendezvous.index == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert fork_ranks(3, raises, 10, ranks=(0, 2, 3)) == 1
    assert capfd.readouterr().err.startswith("rank 2 failed:\nTraceback")
    assert fork_ranks(3, dies, 10, ranks=(3, 0, 2)) == 137
    assert capfd.readouterr().err.startswith("error: rank 3 was killed by SIGKILL: by someone")


def test_peers_of_a_killed_rank_name_themselves_by_global_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> None:
        torch.distributed.all_reduce(torch.zeros(1))  # connections are made at first use
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.zeros(1))

    with pytest.raises(RanksFailed) as failed:
        run_ranks((0, 2, 3), work, 20)
    assert failed.value.code == 137
    told = set(capfd.readouterr().err.splitlines())
    assert {line.split(":")[1] for line in told} == {
        " rank 3 was killed by SIGKILL",
        *(f" rank {rank} has lost its connection to another one, which has ended" for rank in (0, 2)),
    }


def test_a_killed_rank_gives_128_plus_its_signal() -> None:
    assert fork_ranks(1, lambda _: os.kill(os.getpid(), signal.SIGKILL), 10) == 137
    assert fork_ranks(1, lambda _: os.kill(os.getpid(), signal.SIGTERM), 10) == 143


def test_an_interrupted_rank_gives_130_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def main(rendezvous: Rendezvous) -> None:
        raise KeyboardInterrupt

    assert fork_ranks(1, main, 10) == 130
    assert capfd.readouterr().err == ""


def test_a_failing_rank_ends_the_others_within_seconds_and_leaves_no_process(pid_files: Path) -> None:
    def work(index: int) -> None:
        if index == 1:
            pids(pid_files, 4)
            raise RuntimeFailure("lost")
        time.sleep(NEVER)

    began = time.monotonic()
    assert fork_ranks(4, noted(pid_files, work)) == 1
    assert time.monotonic() - began < 10
    assert all(gone(pid, 0.1) for pid in pids(pid_files, 4))


def test_the_first_failure_gives_the_exit_code_and_the_others_may_still_tell_theirs(
    pid_files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(index: int) -> None:
        pids(pid_files, 2)
        if index == 0:
            os._exit(7)
        time.sleep(0.5)
        raise RuntimeFailure("the connection to rank 0 is lost")

    assert fork_ranks(2, noted(pid_files, work), 30) == 7
    assert "the connection to rank 0 is lost" in capfd.readouterr().err


def test_too_long_a_run_ends_with_124_and_leaves_no_process(pid_files: Path) -> None:
    began = time.monotonic()
    assert fork_ranks(2, noted(pid_files, lambda _: time.sleep(NEVER)), 0.7) == 124
    assert time.monotonic() - began < 5
    assert all(gone(pid, 0.1) for pid in pids(pid_files, 2))


def test_an_interrupt_of_the_parent_kills_the_ranks_and_goes_on(pid_files: Path) -> None:
    def work(index: int) -> None:
        if index == 0:
            pids(pid_files, 2)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(NEVER)

    with pytest.raises(KeyboardInterrupt):
        fork_ranks(2, noted(pid_files, work), 30)
    assert all(gone(pid, 0.1) for pid in pids(pid_files, 2))


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_just_after_a_fork_leaves_no_rank_behind(
    at: int, pid_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forked = os.fork, []

    def interrupted() -> int:
        pid = fork()
        if pid:
            forked.append(pid)
            pids(pid_files, len(forked))
            if len(forked) == at + 1:
                os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fork_ranks(2, noted(pid_files, lambda _: time.sleep(NEVER)), 30)
    assert len(forked) == at + 1
    assert all(gone(pid, 0.1) for pid in forked)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_that_is_interrupted_while_it_starts_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork

    def interrupted() -> int:
        pid = fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", interrupted)
    assert fork_ranks(1, lambda _: time.sleep(NEVER), 30) == 130


def test_a_rank_can_be_interrupted_while_it_works() -> None:
    def main(_: Rendezvous) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(NEVER)

    assert fork_ranks(1, main, 30) == 130


def test_ranks_can_be_started_from_another_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(fork_ranks(2, lambda _: None, 30)))
    thread.start()
    thread.join(30)
    assert codes == [0]


def test_when_not_all_ranks_can_be_started_the_first_ones_are_killed(
    pid_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, parent = launch.fork_one, os.getpid()

    def fails_at_the_third(main: Any, rank: int, resume: Any) -> int:
        if rank == 2:
            pids(pid_files, 2)
            raise BlockingIOError("no more processes")
        return fork(main, rank, resume)

    monkeypatch.setattr(launch, "fork_one", fails_at_the_third)
    with pytest.raises(BlockingIOError):
        fork_ranks(3, noted(pid_files, lambda _: time.sleep(NEVER)), 30)
    assert os.getpid() == parent
    assert all(gone(pid, 0.1) for pid in pids(pid_files, 2))


def test_ranks_end_when_the_process_that_started_them_is_killed(pid_files: Path) -> None:
    starter = os.fork()
    if not starter:
        with contextlib.suppress(BaseException):
            fork_ranks(2, noted(pid_files, lambda _: time.sleep(NEVER)))
        os._exit(0)
    ranks = pids(pid_files, 2)
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    assert all(gone(pid) for pid in ranks)


def test_ranks_run_as_batch_jobs() -> None:
    def main(rendezvous: Rendezvous) -> None:
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    assert fork_ranks(1, main, 10) == 0


BROKEN_PIPE = """
import io, os, sys
from hetero_megatron.runtime.launch import fork_ranks
parent = os.getpid()
class Broken(io.StringIO):
    def flush(self):
        raise BrokenPipeError
def main(rendezvous):
    sys.stdout = Broken()
code = fork_ranks(2, main, 10)
assert os.getpid() == parent, "a rank went on as its parent"
sys.stderr.write(f"code {code}\\n")
"""


def test_a_rank_that_cannot_print_does_not_go_on_as_its_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN_PIPE], capture_output=True, text=True, timeout=30)
    assert ended.stderr == "code 1\n"


def test_a_process_of_a_launcher_ends_at_once_on_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Without the clean-up of an ordinary exit, in which gloo waits for messages of other ranks."""
    codes = []
    for error in (RuntimeFailure("boom"), KeyboardInterrupt(), ZeroDivisionError("oh")):
        pid = os.fork()
        if not pid:
            try:
                with end_at_once(3):
                    raise error
            finally:
                os._exit(99)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert codes == [1, 130, 1]
    told = capfd.readouterr().err
    assert told.startswith("error: boom\nrank 3 failed:\nTraceback")
    assert told.endswith("ZeroDivisionError: oh\n\n")


def test_success_under_a_launcher_goes_on() -> None:
    with end_at_once(0):
        reached = True
    assert reached


FIRST_BACKWARD = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from hetero_megatron.runtime.launch import preload
preload(recompute=True)
before = set(sys.modules)
x = torch.ones(2, requires_grad=True)
torch.autograd.backward([checkpoint(torch.sin, x, use_reentrant=False)], [torch.ones(2)])
print(sorted(name for name in set(sys.modules) - before if name.startswith(("torch", "sympy"))))
"""


def test_a_rank_imports_nothing_in_its_first_backward_pass_that_was_not_imported_before_the_fork() -> None:
    shown = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
