"""How long a save stops training: the snapshot of an asynchronous save, beside a blocking save of the same state.

    python benchmarks/checkpoint.py [--ranks 1|2] [--saves 5] [--folder DIR]

A Llama of 100 million parameters, its FP32 weights and Adam moments (1.2 GB); with two ranks ZeRO-1 halves what each
writes. Prints medians: what `start` takes when it returns at once, when it returns at the end, and how long the files
take behind the scenes. Nothing trains meanwhile.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.checkpoint import Saver
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

CONFIG = LlamaConfig(12, 768, 2048, 12, 12, 10_000)


def measure(program: Program, model: Llama, folder: Path, saves: int, rendezvous: Rendezvous) -> None:
    torch.set_num_threads(1)
    world = World.join(rendezvous, program.strategy.ranks, torch.device("cpu"))
    modules = dict(model.named_modules())
    session = Session(program, world, modules, lambda slot: torch.randn(slot.shape), OptimizerSettings())
    session.state.moments["exp_avg"].normal_()
    session.state.moments["exp_avg_sq"].normal_()
    times: dict[str, list[float]] = {"stall": [], "behind": [], "blocking": []}
    for asynchronous in (True, False):
        saver = Saver(folder, session, 1, asynchronous, say=lambda text: None)
        for number in range(saves):
            session.iteration += 1
            dist.barrier()
            at = time.perf_counter()
            saver.start(session.iteration, {})
            started = time.perf_counter() - at
            saver.finish()
            if number:  # the first one allocates the buffers
                times["stall" if asynchronous else "blocking"].append(started)
                if asynchronous:
                    times["behind"].append(time.perf_counter() - at)
    path = folder / f"iter_{session.iteration:07d}"
    at = time.perf_counter()
    saved = SavedState.open(path)
    for slot in session.state.slots:
        saved.initial(slot)
    saved.restore(session)
    loaded = time.perf_counter() - at
    if world.rank == 0:
        size = sum(file.stat().st_size for file in path.iterdir())
        stall, behind, blocking = (1000 * statistics.median(times[kind]) for kind in times)
        print(f"{len(world.ranks)} rank(s), {size / 1e9:.2f} GB a save, median of {saves - 1}:")
        print(f"  asynchronous: {stall:.0f} ms until training goes on, {behind:.0f} ms until it is complete")
        print(f"  blocking:     {blocking:.0f} ms")
        print(f"  loading:      {1000 * loaded:.0f} ms")
    dist.barrier()
    world.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when left out")
    options = parser.parse_args()
    pipelines = [
        Pipeline(1, 1, (Stage((rank,), (0, CONFIG.num_layers - 1)),)) for rank in range(options.ranks)
    ]
    strategy = Strategy(tuple(pipelines), zero=int(options.ranks > 1))
    model = Llama(CONFIG)
    program = Program.build(trace(model), strategy, CONFIG.facts, Cluster.local_cpu(options.ranks))
    preload(recompute=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        code = fork_ranks(
            options.ranks,
            lambda rendezvous: measure(program, model, Path(folder), options.saves, rendezvous),
        )
    raise SystemExit(code)


if __name__ == "__main__":
    main()
