"""How fast a live switch moves the state, beside plain gloo messages of the same sizes in the same run.

    python -m benchmarks.switch [--rounds 5] [--layers 12] [--pairs TP2:PP2 ...]

A Llama of 100 million parameters with FP32 master weights and Adam moments (1.2 GB), two ranks. Each round switches
there and back, and sends the same bytes per pair of ranks as one message: from memory that is in use into memory that is
new, as every switch has to (`new`), and into a buffer that is used again (`warm`), which a switch cannot have. A rank
that keeps slices copies them into its new buffers; `copied` adds a plain copy of as many bytes to `new`. Prints medians
of moved bytes per second, of the whole switch and of its phases, and the ratio to each of the three.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

Pair = tuple[int, int]


def plans(layers: int) -> dict[str, Strategy]:
    last, half = layers - 1, layers // 2

    def pipeline(*stages: tuple[tuple[int, ...], int, int]) -> Strategy:
        ranks = {rank for each, _, _ in stages for rank in each}
        made = tuple(Stage(each, (first, end)) for each, first, end in stages)
        return Strategy((Pipeline(1, 1, made),), idle_ranks=tuple({0, 1} - ranks))

    return {
        "TP2": pipeline(((0, 1), 0, last)),
        "PP2": pipeline(((0,), 0, half - 1), ((1,), half, last)),
        "PP2 uneven": pipeline(((0,), 0, half + half // 2 - 1), ((1,), half + half // 2, last)),
        "one": pipeline(((0,), 0, last)),
        "other": pipeline(((1,), 0, last)),
    }


def plain(
    world: World, sizes: dict[Pair, int], warm: dict[Pair, Tensor] | None, source: Tensor, kept: int = 0
) -> float:
    """Seconds of one message per pair, all posted together, and of a copy of `kept` bytes meanwhile."""
    dist.barrier()
    at = time.perf_counter()
    work = []
    for (src, dst), size in sizes.items():
        if dst == world.rank:
            buffer = torch.empty(size // 4) if warm is None else warm[src, dst]
            work.append(dist.irecv(buffer, world.index(src)))
    for (src, dst), size in sizes.items():
        if src == world.rank:
            work.append(dist.isend(source[: size // 4], world.index(dst)))
    if kept:
        torch.empty(kept // 4).copy_(source[: kept // 4])
    for each in work:
        each.wait()
    return longest(time.perf_counter() - at)


def longest(seconds: float) -> float:
    number = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def measure(
    programs: dict[str, Program],
    model: Llama,
    names: list[tuple[str, str]],
    rounds: int,
    rendezvous: Rendezvous,
) -> None:
    torch.set_num_threads(1)
    world = World.join(rendezvous, (0, 1), torch.device("cpu"))
    for before, after in names:
        run = Switcher(
            {name: programs[name] for name in (before, after)},
            world,
            lambda: dict(Llama(model.config).named_modules()),
            lambda slot: torch.full(slot.shape, 0.5),
            OptimizerSettings(),
        )
        run.prepare()
        for src, dst in ((before, after), (after, before)):
            sizes = {pair: size for pair, size in messages(run, src, dst).items() if size}
            kept = copied(run, src, dst, world.rank)
            source = torch.ones(max(kept, *sizes.values()) // 4)
            warm = {pair: torch.ones(size // 4) for pair, size in sizes.items()}
            found: dict[str, list[float]] = {}
            for number in range(rounds + 1):
                if run.active != src:
                    run.switch(src)
                dist.barrier()
                report = run.switch(dst)
                took = dict(report.seconds)
                took["new"] = plain(world, sizes, None, source)
                took["copied"] = plain(world, sizes, None, source, kept)
                took["warm"] = plain(world, sizes, warm, source)
                for key, value in took.items() if number else ():
                    found.setdefault(key, []).append(value)
            if world.rank == 0:
                moved = sum(sizes.values())
                medians = {key: statistics.median(values) for key, values in found.items()}
                ratios = {key: medians[key] / medians["total"] for key in ("new", "copied", "warm")}
                spread = sorted(n / t for n, t in zip(found["new"], found["total"], strict=True))
                phases = ", ".join(f"{key} {medians[key]:.3f}" for key in ("pack", "move", "unpack"))
                print(
                    f"{src:>10} -> {dst:10} {moved / 1e6:7.0f} MB  switch {moved / medians['total'] / 1e9:5.2f} GB/s  "
                    f"plain new {moved / medians['new'] / 1e9:5.2f} warm {moved / medians['warm'] / 1e9:5.2f}  "
                    f"ratio {ratios['new']:.2f} ({spread[0]:.2f}-{spread[-1]:.2f}) / {ratios['copied']:.2f} / "
                    f"{ratios['warm']:.2f}  [{phases}]",
                    flush=True,
                )
            del source, warm
        del run
    dist.barrier()
    world.leave()


def messages(run: Switcher, before: str, after: str) -> dict[Pair, int]:
    """Bytes by sender and receiver."""
    scheme = run.plan(before, after).scheme()
    found: dict[Pair, int] = {}
    for transfer in scheme.transfers:
        tensor = scheme.tensors[transfer.tensor]
        size = 4
        for lo, hi in transfer.region.bounds(tensor.shape):
            size *= hi - lo
        pair = transfer.src, transfer.dst
        found[pair] = found.get(pair, 0) + size
    return found


def copied(run: Switcher, before: str, after: str, rank: int) -> int:
    """Bytes that a rank keeps."""
    scheme = run.plan(before, after).scheme()
    total = 0
    for copy in scheme.copies:
        if copy.rank == rank:
            size = 4
            for lo, hi in copy.region.bounds(scheme.tensors[copy.tensor].shape):
                size *= hi - lo
            total += size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pairs", nargs="*", default=["TP2:PP2", "PP2:PP2 uneven", "one:other", "one:TP2"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(options.layers, 768, 2048, 12, 12, 10_000)
    model = Llama(config)
    graph, cluster = trace(model), Cluster.local_cpu(2)
    programs = {
        name: Program.build(graph, plan, config.facts, cluster)
        for name, plan in plans(options.layers).items()
    }
    names = [tuple(pair.split(":")) for pair in options.pairs]
    preload(recompute=False)
    fork_ranks(
        2, lambda rendezvous: measure(programs, model, names, options.rounds, rendezvous), ranks=(0, 1)
    )


if __name__ == "__main__":
    main()
