"""Time from the model to one rank's executable graph (paper Table 5 and Figure 20: 6.2-7.9 s on the paper's system).

    python benchmarks/specialize.py [--ranks 32,128,512,1024]

Prints the phases for the paper's C2 strategy of the 32B model (60 layers, 31 ranks), then how the time grows with
the number of ranks for pipelines of 16 ranks (4 stages of TP4), one rank's graph each time. One core, no process group.
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.llama import Llama
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.program import Program
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Stage, Strategy

T = TypeVar("T")
C2 = Path(__file__).parent.parent / "recipes" / "paper" / "c2.yaml"


def timed(work: Callable[[], T]) -> tuple[float, T]:
    gc.collect()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def pipelines(ranks: int, layers: int) -> Strategy:
    quarter = layers // 4
    return Strategy(
        tuple(
            Pipeline(4, 1, tuple(
                Stage(tuple(range(first + 4 * s, first + 4 * s + 4)), (quarter * s, quarter * s + quarter - 1))
                for s in range(4)
            ))
            for first in range(0, ranks, 16)
        )
    )  # fmt: skip


def walk(strategy: Strategy, cluster: Cluster, rank: int) -> dict[str, float]:
    config = PRESETS["llama_32b"]
    seconds: dict[str, float] = {}
    seconds["model"], model = timed(lambda: Llama(config))
    seconds["trace"], graph = timed(lambda: trace(model))
    seconds["program"], program = timed(lambda: Program.build(graph, strategy, config.facts, cluster))
    seconds["executable"], executable = timed(lambda: program.executable(rank))
    assert executable.chunks, "the rank computes something"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="32,128,512,1024")
    arguments = parser.parse_args()
    recipe = load_recipe(C2)
    print("C2, 32B, 60 layers, 31 ranks; seconds on one core, from model to the executable graph of rank 28")
    for _ in range(3):
        seconds = walk(recipe.make_strategy(), recipe.make_cluster(), 28)
        print(
            "  "
            + "  ".join(f"{phase} {value:.3f}" for phase, value in seconds.items())
            + f"  all {sum(seconds.values()):.3f}"
        )
    print("growth with ranks, pipelines of 4 stages of TP4; seconds")
    first = 0.0
    for ranks in map(int, arguments.ranks.split(",")):
        seconds = walk(pipelines(ranks, 60), Cluster.of_nodes({"h20": ranks // 8}), 0)
        whole = sum(seconds.values())
        first = first or whole
        parts = "  ".join(f"{phase} {value:.3f}" for phase, value in seconds.items())
        print(f"  {ranks:5d} ranks  {parts}  all {whole:.3f}  ({whole / first:.2f}x of the first line)")


if __name__ == "__main__":
    main()
