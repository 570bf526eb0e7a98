"""From kill -9 to the next committed step: in the surviving processes, and by checkpoint and restart.

`python -m benchmarks.recovery [--repeats 5]`: a small model on 4 local ranks (a pipeline of three stages and one of a
single rank, ZeRO-1), rank 1 killed from outside in the middle of training. The restart has a checkpoint of the step
before the last, and counts the same time: from the kill to the first step that is further than the last one before.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
KILL_AT = 12


def main() -> None:
    """Print both medians and the spread."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("elastic", "restart"))
    arguments = parser.parse_args()
    ways: dict[str, Callable[[Path], float]] = {"elastic": elastic, "restart": restart}
    for name, way in ways.items():
        if arguments.only in (None, name):
            found = []
            for _ in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(way(Path(folder)))
            print(
                f"{name:8} kill -9 to the next committed step: median {statistics.median(found):.2f} s "
                f"({min(found):.2f} to {max(found):.2f}, {len(found)} runs, load {os.getloadavg()[0]:.1f})",
                flush=True,
            )


def elastic(folder: Path) -> float:
    """The others go on."""
    run = Training(folder, ["-m", "hetero_megatron", "pretrain", "--elastic"])
    try:
        run.wait_for(KILL_AT)
        killed = run.kill_rank(1)
        last = run.iteration
        run.wait_for(last + 1, "a step after the loss")
        return time.time() - killed
    finally:
        run.end()


def restart(folder: Path) -> float:
    """All are ended and started again by the same command, as a job script would, and go on from the checkpoint."""
    run = Training(folder, ["-m", "hetero_megatron", "pretrain"])
    try:
        run.wait_for(KILL_AT)
        killed = run.kill_rank(1)
        last = run.start_again()
        run.wait_for(last + 1, "a step after the restart")
        return time.time() - killed
    finally:
        run.end()


class Training:
    """A run in processes of its own, watched by its metrics file."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"{RECIPE}output: {folder / 'run'}\n")
        self._output = folder / "out"
        self._metrics = folder / "run" / "metrics.jsonl"
        self._command = [sys.executable, *command, str(recipe)]
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self._command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_again(self) -> int:
        """Wait until the run has ended, and start the same command; the last step of the one before."""
        self._process.wait()
        last = self.iteration
        self._process = self._start()
        return last

    @property
    def iteration(self) -> int:
        """The last step in the metrics."""
        try:
            lines = self._metrics.read_bytes().splitlines()
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def wait_for(self, iteration: int, what: str = "training") -> None:
        """Until the step `iteration` is written."""
        deadline = time.time() + 120
        while self.iteration < iteration:
            if self._process.poll() is not None:
                told = self._output.read_text(errors="replace")[-6000:]
                raise SystemExit(
                    f"{told}\nwaiting for {what}: the run has ended with {self._process.returncode}"
                )
            if time.time() > deadline:
                raise SystemExit(f"waiting for {what}: iteration {iteration} has not come in 120 s")
            time.sleep(0.002)

    def kill_rank(self, number: int) -> float:
        """Kill the `number`-th rank process; returns when (`time.time`)."""
        ranks = sorted(child for child in _children(self._process.pid))
        os.kill(ranks[number], signal.SIGKILL)
        return time.time()

    def end(self) -> None:
        """End the run and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


if __name__ == "__main__":
    main()
