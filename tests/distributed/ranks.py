"""Real processes for tests: forked ranks on gloo, their results collected by rank."""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.runtime.launch import Rendezvous, fork_ranks
from hetero_megatron.runtime.world import World


class RanksFailed(AssertionError):
    """Some rank ended with an error; carries the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ranks ended with exit code {code}")
        self.code = code


def run_ranks(ranks: Sequence[int], work: Callable[[World], Any], timeout_s: float = 60.0) -> dict[int, Any]:
    """`work(world)` on every rank in a process of its own; results by rank.

    Raises:
        RanksFailed: a rank failed or the time was up; no process is left behind.
    """
    torch.set_num_threads(1)
    ordered = sorted(ranks)
    with tempfile.TemporaryDirectory() as folder:

        def main(rendezvous: Rendezvous) -> None:
            world = World.join(rendezvous, ordered, torch.device("cpu"), timeout_s)
            result = work(world)
            (Path(folder) / f"{world.rank}.pickle").write_bytes(pickle.dumps(result))
            torch.distributed.barrier()
            world.leave()

        code = fork_ranks(len(ordered), main, timeout_s, ordered)
        if code:
            raise RanksFailed(code)
        return {rank: pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in ordered}
