"""The data path against what a model consumes: tokens per second and core, and how long a rank waits for its steps.

    python -m benchmarks.data [--rounds 5] [--seconds 1]

The whole path of a run is measured, with nothing prepared ahead: read files, bytes to tokens, choose the step's
samples, pack or dispatch them, micro-batches as tensors. In the same run and in turn, one rank trains the model of
recipes/quickstart.yaml on one core. Then the same training with loaders: how long a step waits for its data.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from hetero_megatron.data.loader import Loader
from hetero_megatron.recipe import load_recipe
from hetero_megatron.run import Run, prepare
from hetero_megatron.runtime.launch import Rendezvous, use_batch_scheduling
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.train import start_session

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
ONE_RANK = "[{micro_batches: 4, micro_batch_size: 2, stages: [{ranks: 0, layers: 0-3}]}]"
PACKINGS, WORKERS = ("rows", "documents"), (0, 1)


def run_of(packing: str, workers: int, folder: str) -> Run:
    changes = [
        f"strategy.pipelines={ONE_RANK}",
        f"data.packing={packing}",
        f"data.workers={workers}",
        f"output={folder}",
    ]
    return prepare(load_recipe(str(QUICKSTART), changes))


def loader_of(run: Run) -> Loader:
    loader = run.loader(0, run.start.position)
    loader.start()
    return loader


def prepared(loader: Loader, seconds: float) -> float:
    """Tokens per second of the data path by itself."""
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        step = loader.next()
        assert step is not None, "a run by iterations has no last step"
        tokens += step.tokens
    return tokens / elapsed


def trained(session: Session, loader: Loader, seconds: float) -> tuple[float, float, float]:
    """Tokens per second of the steps alone, the median wait for a step's data, and its share of the time."""
    began, tokens, waits, inside = time.perf_counter(), 0, [], 0.0
    while time.perf_counter() - began < seconds:
        step = loader.next()
        assert step is not None, "a run by iterations has no last step"
        at = time.perf_counter()
        session.step(step.batches)
        inside += time.perf_counter() - at
        tokens += step.tokens
        waits.append(step.wait_seconds)
    return tokens / inside, statistics.median(waits), sum(waits) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    use_batch_scheduling()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {
            (packing, workers): run_of(packing, workers, folder)
            for packing in PACKINGS
            for workers in WORKERS
        }
        alone = {packing: loader_of(runs[packing, 0]) for packing in PACKINGS}
        beside = {key: loader_of(run) for key, run in runs.items()}
        for loader in (*alone.values(), *beside.values()):
            stack.callback(loader.close)
        world = World.join(Rendezvous(0, 1, f"{folder}/store"), (0,), torch.device("cpu"))
        session = start_session(runs["rows", 0], world)
        rates: dict[str, list[float]] = {"model": [], **{packing: [] for packing in PACKINGS}}
        waits: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in runs}
        for number in range(arguments.rounds + 1):
            seconds = arguments.seconds if number else 0.2
            for packing in PACKINGS:
                rate = prepared(alone[packing], seconds)
                rates[packing] += [rate] if number else []
                for workers in WORKERS:
                    consumed, *waited = trained(session, beside[packing, workers], seconds)
                    if number:
                        rates["model"].append(consumed)
                        waits[packing, workers].append((waited[0], waited[1]))
        world.leave()
    report(rates, waits)


def report(rates: dict[str, list[float]], waits: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    """Medians, and the ratio to what the model consumes."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, found in rates.items():
        ratio = (
            ""
            if name == "model"
            else f", {medians[name] / medians['model']:.0f} times what the model consumes"
        )
        print(
            f"{name:10} {medians[name]:12,.0f} tokens/s on one core (median of {len(found)}, {min(found):,.0f} to "
            f"{max(found):,.0f}){ratio}"
        )
    for (packing, workers), found in waits.items():
        wait, share = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"{packing:10} workers {workers}: a step waits {1e3 * wait:.2f} ms for its data, {share:.2%} of the time"
        )


if __name__ == "__main__":
    main()
