"""From kill -9 to the next committed step: in the surviving processes, and by checkpoint and restart beside it.

`python -m benchmarks.recovery [--repeats 5] [--only elastic,torchrun,again]`: a small model on 4 local ranks (a pipeline
of three stages and one of a single rank, ZeRO-1). Rank 1 is killed from outside in the middle of training, each time at
another moment of a step. Three ways to go on:

- elastic: `pretrain --elastic`, the others go on in their processes;
- torchrun: `torchrun --max-restarts 3 -m hetero_megatron.train`, which ends all ranks, starts them anew, and goes on
  from a checkpoint that is saved every 5 steps;
- again: `pretrain`, and the same command once more as soon as it has ended, as a job script would.

The clock starts right before the kill, and stops with the time that the ranks themselves wrote beside a step. `beyond`
is the first step of the new strategy, or after a restart the first one further than any made before the kill: only
that is progress. `first` is after a restart the first step at all, which was made before the kill as well. A step that
still counts under the old strategy, or that survivors finish of it, is neither.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECIPE = """
model: {preset: llama_tiny, num_layers: 4}
strategy:
  zero: 1
  pipelines:
  - {micro_batches: 3, micro_batch_size: 1, stages: [{ranks: 0, layers: 0}, {ranks: 1, layers: 1-2}, {ranks: 2, layers: 3}]}
  - {micro_batches: 1, micro_batch_size: 1, stages: [{ranks: 3, layers: 0-3}]}
training: {global_batch_size: 4, seq_length: 128, lr: 1.0e-3, train_iters: 100000, log_interval: 100000}
checkpoint: {interval: 5}
"""
RANKS = 4
KILLED = 1
KILL_AT = 12
"""The kill comes within one step after this one."""
PATIENCE_SECONDS = 120.0
RECOVERED = re.compile(r"going on with ranks .* after iteration (\d+), in [0-9.]+ s \((.*)\)")


@dataclass(frozen=True)
class Found:
    """One kill.

    Attributes:
        beyond, first: seconds from the kill, as above; `first` is None where there was no restart.
        phases: where the time went, by name, in seconds.
        redone: steps that were made twice.
    """

    beyond: float
    first: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    redone: int = 0


def main() -> None:
    """Print medians, spreads and phases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="elastic,torchrun,again")
    arguments = parser.parse_args()
    began, console, results = time.time(), Console(highlight=False, width=120), {}
    for name in arguments.only.split(","):
        results[name] = []
        for repeat in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(WAYS[name](Path(folder), random.Random(repeat)))
    console.print(table(results))
    for line in lines(results):
        console.print(line, soft_wrap=True)
    console.print(
        f"{arguments.repeats} kills each, load {os.getloadavg()[0]:.1f}, {time.time() - began:.0f} s in all"
    )


def table(results: Mapping[str, Sequence[Found]]) -> Table:
    """Seconds from the kill, by way."""
    shown = Table(title="seconds from kill -9 of rank 1 of 4", title_justify="left")
    for column in ("", "beyond: median", "least to most", "first: median", "least to most", "steps redone"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, found in results.items():
        own = [each.beyond for each in found]
        first = [each.first for each in found if each.first is not None]
        redone = statistics.mean(each.redone for each in found)
        shown.add_row(name, *_spread(own), *(_spread(first) if first else ("", "")), f"{redone:.1f}")
    return shown


def lines(results: Mapping[str, Sequence[Found]]) -> list[str]:
    """Medians of the phases, and how much longer a restart takes."""
    told = []
    for name, found in results.items():
        names = dict.fromkeys(phase for each in found for phase in each.phases)
        parts = [
            f"{phase} {statistics.median(each.phases.get(phase, 0.0) for each in found):.3f}"
            for phase in names
        ]
        if parts:
            told.append(f"{name}, medians of the phases in seconds: {', '.join(parts)}")
    if "elastic" in results:
        ours = statistics.median(each.beyond for each in results["elastic"])
        for name, found in results.items():
            if name != "elastic":
                theirs = statistics.median(each.beyond for each in found)
                told.append(f"{name} takes {theirs / ours:.1f} times as long as elastic")
    return told


def _spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def elastic(folder: Path, chance: random.Random) -> Found:
    """The others go on."""
    with Training(folder, ["-m", "hetero_megatron", "pretrain", "--elastic"]) as run:
        run.wait_for(lambda: run.iteration >= KILL_AT, f"iteration {KILL_AT}")
        killed = run.kill(chance)
        run.wait_for(lambda: run.recovery is not None, "the line of the recovery")
        recovery = run.recovery
        assert recovery is not None, "it was waited for"
        last, phases = recovery
        run.wait_for(lambda: last + 1 in run.times, "a step of the new strategy")
        beyond = run.times[last + 1] - killed
        step = run.seconds[last + 1]
        rest = beyond - sum(phases.values()) - step
        return Found(beyond, None, {**phases, "step": step, "between these": rest})


def torchrun(folder: Path, chance: random.Random) -> Found:
    """The launcher ends the others and starts all anew."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "3", "-m", "hetero_megatron.train"]
    with Training(folder, command) as run:
        return _restarted(run, chance)


def again(folder: Path, chance: random.Random) -> Found:
    """Without a launcher: the same command again when the first one has ended."""
    with Training(folder, ["-m", "hetero_megatron", "pretrain"]) as run:
        return _restarted(run, chance, run.start_again)


def _restarted(run: "Training", chance: random.Random, start: Callable[[], None] | None = None) -> Found:
    run.wait_for(lambda: run.iteration >= KILL_AT, f"iteration {KILL_AT}")
    before = run.incarnation
    killed = run.kill(chance)
    if start is not None:
        start()
    run.wait_for(lambda: run.incarnation != before, "the start of the new ranks")
    started, resumed = time.time(), run.resumed_at
    # What the old ranks wrote to the end, their steps after the kill included, and not what is left of it.
    last = run.most
    run.wait_for(lambda: last + 1 in run.times, "a step after the restart")
    times = run.times
    phases = {
        "until the new ranks are ready": started - killed,
        "first step": times[resumed + 1] - started,
        "further steps up to the first new one": times[last + 1] - times[resumed + 1],
    }
    return Found(times[last + 1] - killed, times[resumed + 1] - killed, phases, last - resumed)


WAYS: Mapping[str, Callable[[Path, random.Random], Found]] = {
    "elastic": elastic,
    "torchrun": torchrun,
    "again": again,
}


class Training:
    """A run in processes of its own, watched by its metrics file.

    Attributes:
        most: the furthest step that any incarnation of the run was seen to have made.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Nothing has started yet."""
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"{RECIPE}output: {folder / 'run'}\n")
        self._output = folder / "out"
        self._folder = folder / "run"
        self._command = [sys.executable, *command, str(recipe)]
        self._process: subprocess.Popen[bytes]
        self.most = 0

    def __enter__(self) -> "Training":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_again(self) -> None:
        """Wait until the run has ended, and start the same command."""
        self._process.wait()
        self.iteration  # noqa: B018 - takes note of the last step
        self._start()

    def _metrics(self) -> list[dict[str, float]]:
        try:
            content = (self._folder / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        # The last line may still be on its way.
        found = [json.loads(line) for line in content.split(b"\n")[:-1]]
        if found:
            self.most = max(self.most, int(found[-1]["iteration"]))
        return found

    @property
    def iteration(self) -> int:
        """The last step in the metrics."""
        found = self._metrics()
        return int(found[-1]["iteration"]) if found else 0

    @property
    def times(self) -> dict[int, float]:
        """When each step was made, by the ranks' clock."""
        return {int(line["iteration"]): line["time"] for line in self._metrics()}

    @property
    def seconds(self) -> dict[int, float]:
        """What each step took."""
        return {int(line["iteration"]): line["step_seconds"] for line in self._metrics()}

    @property
    def incarnation(self) -> int:
        """Another number whenever ranks have taken up the run's folder."""
        self._metrics()
        try:
            return (self._folder / "run.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def resumed_at(self) -> int:
        """The step from which the present ranks went on."""
        return int(json.loads((self._folder / "run.json").read_text())["resumed_at"])

    @property
    def recovery(self) -> tuple[int, dict[str, float]] | None:
        """Of the recovery's line in the log: the last step before it, and its phases."""
        return recovery_of(self._output.read_text(errors="replace"))

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Until it is done.

        Raises:
            SystemExit: the run has ended before, or it takes too long.
        """
        deadline = time.time() + PATIENCE_SECONDS
        while not done():
            if self._process.poll() is not None:
                told = self._output.read_text(errors="replace")[-6000:]
                raise SystemExit(
                    f"{told}\nwaiting for {what}: the run has ended with {self._process.returncode}"
                )
            if time.time() > deadline:
                raise SystemExit(f"waiting for {what}: it has not come in {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.005)

    def kill(self, chance: random.Random) -> float:
        """Kill a rank somewhere in the next step; returns when (`time.time`)."""
        victim = self._pid_of(KILLED)
        time.sleep(chance.random() * self.seconds[self.iteration])
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        return killed

    def _pid_of(self, rank: int) -> int:
        children = _children(self._process.pid)
        told = {_variable(pid, "RANK"): pid for pid in children}
        # A launcher says which process is which; our own starts them in order.
        return told.get(str(rank)) or sorted(children)[rank]

    def _end(self) -> None:
        # A launcher's ranks are in sessions of their own.
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def recovery_of(text: str) -> tuple[int, dict[str, float]] | None:
    """The last step before a recovery and its phases in seconds, from a log; None before there was one."""
    found = RECOVERED.search(text)
    if found is None:
        return None
    parts = (part.rsplit(" ", 1) for part in found[2].split(", "))
    return int(found[1]), {name: float(seconds) for name, seconds in parts}


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _descendants(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _variable(pid: int, name: str) -> str | None:
    """A variable of another process's environment."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key.decode() == name:
                return value.decode()
    return None


if __name__ == "__main__":
    main()
