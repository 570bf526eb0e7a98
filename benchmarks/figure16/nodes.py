"""The nodes of a trace as processes: supervisors with their ranks, killed and started from outside, and watched."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.figure16.traces import ROOT, Trace
from hetero_megatron.runtime.launch import end_with_parent

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of all processes of a run at one moment: their number, memory without counting shared pages twice (bytes),
    threads of all, most open files of one."""

    processes: int
    memory: int
    threads: int
    most_files: int


@dataclass
class Watched:
    """The steps in a metrics file, each with when it was first seen (`time.time`)."""

    path: Path
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)

    @property
    def iteration(self) -> int:
        """The last step so far."""
        with contextlib.suppress(FileNotFoundError):
            now = time.time()
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    values = json.loads(line)
                    self.steps[values["iteration"]] = values
                    self.seen.setdefault(values["iteration"], now)
        return max(self.steps, default=0)


class Nodes:
    """A run of `hetero-megatron pretrain --elastic`, one supervisor per node; a context manager that leaves nothing."""

    def __init__(self, trace: Trace, recipe: Path, run_folder: Path, patience_s: float = 600.0) -> None:
        """Nothing is started. `patience_s`: how long a step, with a recovery in it, may take."""
        self._trace, self._recipe, self._patience = trace, recipe, patience_s
        self.watched = Watched(run_folder / "metrics.jsonl")
        self.output = recipe.with_suffix(".log")
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.pids: dict[int, int] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def __enter__(self) -> "Nodes":
        for node in range(self._trace.present or self._trace.nodes):
            self.start(node)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._nodes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, node: int) -> float:
        """Start a node's supervisor, which starts its ranks; when (`time.time`)."""
        place: list[str] = []
        if self._trace.nodes > 1:
            present = self._trace.present or self._trace.nodes
            place = ["--endpoint", self._endpoint, "--node-rank", str(node), "--nodes-present", str(present)]
        with (self.output if not node else self.output.with_suffix(f".{node}.log")).open("wb") as output:
            self._nodes[node] = subprocess.Popen(
                [sys.executable, "-m", "hetero_megatron", "pretrain", "--elastic", *place, str(self._recipe)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "80"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        return time.time()

    def wait_for_recoveries(self, count: int) -> None:
        """Until the log tells of so many."""
        deadline = time.time() + self._patience
        while self.output.read_text(errors="replace").count("going on with ranks") < count:
            _ = self.watched.iteration
            self._check(deadline, f"recovery {count}")
            time.sleep(_POLL_SECONDS)

    def wait_for(self, iteration: int) -> None:
        """Until the step `iteration` is written."""
        deadline = time.time() + self._patience
        before = self.watched.iteration
        while (now := self.watched.iteration) < iteration:
            if now > before:
                before, deadline = now, time.time() + self._patience
            self._check(deadline, f"iteration {iteration}")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Ask the run to stop after its step, saved, and wait until node 0 has ended well."""
        self._nodes[0].terminate()
        deadline = time.time() + self._patience
        while self._nodes[0].poll() is None:
            _ = self.watched.iteration
            self._check(deadline, "the end")
            time.sleep(_POLL_SECONDS)
        if self._nodes[0].returncode:
            self._check(0.0, "the end")
        _ = self.watched.iteration

    def _check(self, deadline: float, what: str) -> None:
        ended = self._nodes[0].poll()
        if ended is None and time.time() < deadline:
            return
        why = f"has ended with {ended}" if ended is not None else f"took more than {self._patience:.0f} s"
        raise RuntimeError(
            f"{self.output.read_text(errors='replace')[-8000:]}\nwaiting for {what}: node 0 {why}"
        )

    def note_ranks(self) -> None:
        """Process ids of the ranks, which a supervisor starts in their order."""
        size = self._trace.node_size
        for node, process in self._nodes.items():
            children = _children(process.pid)
            if process.poll() is None and len(children) == size:
                self.pids |= dict(zip(range(node * size, (node + 1) * size), children, strict=True))

    def kill(self, ranks: tuple[int, ...]) -> float:
        """`kill -9` of these ranks, all at the same time; when (`time.time`)."""
        at = time.time()
        for rank in ranks:
            os.kill(self.pids.pop(rank), signal.SIGKILL)
        return at

    def footprint(self) -> Footprint:
        """As it is now."""
        pids = [p.pid for p in self._nodes.values() if p.poll() is None] + list(self.pids.values())
        memory, threads, files = 0, 0, 0
        for pid in pids:
            _ = self.watched.iteration
            with contextlib.suppress(OSError):
                memory += 1024 * _number(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
                threads += _number(Path(f"/proc/{pid}/status"), "Threads:")
                files = max(files, len(os.listdir(f"/proc/{pid}/fd")))
        return Footprint(len(pids), memory, threads, files)


def _number(path: Path, key: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def _children(pid: int) -> list[int]:
    """In the order of their birth."""
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
