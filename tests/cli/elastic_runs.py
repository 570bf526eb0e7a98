"""`pretrain --elastic` in this process, or with supervisors of their own that can be killed."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hetero_megatron import elastic, train
from hetero_megatron.recipe import load_recipe
from hetero_megatron.runtime.launch import fork_one
from tests.cli.commands import SMALL

STEPS = "training: {train_iters: 6, global_batch_size: 3, seq_length: 64, lr: 1e-2, log_interval: 1}"
RECIPE = SMALL.partition("training:")[0] + STEPS
# Each of two nodes has the whole model.
NODES = f"""
model: {{preset: llama_tiny, num_layers: 2, hidden_size: 32, ffn_hidden_size: 64}}
cluster: {{cpu: {{nodes: 2, devices_per_node: 2}}}}
strategy:
  pipelines:
  - {{micro_batches: 2, micro_batch_size: 1, stages: [{{ranks: 0, layers: 0}}, {{ranks: 1, layers: 1}}]}}
  - {{micro_batches: 1, micro_batch_size: 1, stages: [{{ranks: 2-3, layers: 0-1}}]}}
{STEPS}
"""


Losses = list[tuple[int, float]]
"""By iteration."""


@dataclass
class Place:
    """A folder for a run and its recipe; `cache` is where the corpus is, for several runs."""

    folder: Path
    cache: Path

    def recipe(self, more: str = "", text: str = RECIPE) -> Path:
        """The recipe's file."""
        path = self.folder / "recipe.yaml"
        path.write_text(f"{text}\ndata: {{cache: {self.cache}}}\n{more}\noutput: {self.run}\n")
        return path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def losses(self) -> Losses:
        """What was written of each step so far."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(each["iteration"], each["loss"]) for each in map(json.loads, lines)]

    def samples(self) -> list[tuple[int, int]]:
        """First and next sample of each step."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [(each["first_sample"], each["consumed_samples"]) for each in map(json.loads, lines)]


def pretrain(path: Path) -> int:
    """An elastic run of ranks that are this process's children."""
    return elastic.pretrain_elastic(train.prepare(load_recipe(path)))


@dataclass
class Node:
    """A supervisor in a process of its own."""

    pid: int
    log: Path
    ranks: list[int] = field(default_factory=list)

    def children(self) -> list[int]:
        """Its ranks' process ids."""
        with contextlib.suppress(FileNotFoundError):
            found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            self.ranks = [int(child) for child in found] or self.ranks
        return self.ranks

    def kill(self) -> None:
        """End the supervisor, and with it its ranks."""
        self.children()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ended(self) -> int:
        """Its exit code."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def supervised(path: Path, place: elastic.Place | None = None) -> Iterator[Node]:
    """A supervisor that starts now; whatever is left of it is killed at the end."""
    log = path.parent / f"node{place.node if place else 0}.log"

    def main() -> None:
        # Both of Python's streams and both of the process, whatever pytest has made of them.
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        for number in (1, 2):
            os.dup2(sys.stdout.fileno(), number)
        if code := elastic.pretrain_elastic(train.prepare(load_recipe(path)), place):
            os._exit(code)

    node = Node(fork_one(main, 0, lambda: None), log)
    try:
        yield node
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(node.pid, signal.SIGKILL)
            os.waitpid(node.pid, 0)


def wait_until(found: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as handle:
        handle.bind(("127.0.0.1", 0))
        port: int = handle.getsockname()[1]
        return port
