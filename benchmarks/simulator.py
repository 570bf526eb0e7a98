"""Predicted against measured steps on this machine: one profile, then more than twenty strategies.

    PYTHONPATH=. python benchmarks/simulator.py [--rounds 5] [--steps 5] [--ranks 2] [--slow 3] [--only NAME] [--json FILE]
    PYTHONPATH=. python benchmarks/simulator.py --paced 10 --ranks 4

First the units of a small Llama are measured, as `hetero-megatron profile` does, with as many copies side by side as
ranks will compute; then every strategy trains for some steps on forked ranks. Ranks called slow really are: after each
forward or backward they keep their core busy for `slow` - 1 times as long as it took. A measured step is the least of
the rounds' medians. Prints both times of every strategy, the mean error and the rank correlation. Run it on an idle
machine with as many free cores as `--ranks`; on a busy one, it measures the others.

With `--paced MS` nothing is profiled: a tiny model is trained, and every pass sleeps until it has lasted MS per layer
forward and twice as much backward. Sleeping needs no core, so this runs on a busy machine and with more ranks than cores.
It compares how passes wait for each other, in the real runtime and in the simulation, and says nothing about the
prediction of compute times.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hetero_megatron.cluster import KINDS, Cluster, Device
from hetero_megatron.data.batch import pack
from hetero_megatron.data.rows import Piece
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import Action
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.measure import Experiment, measure
from hetero_megatron.planner.profiles import Measurement, Profiles
from hetero_megatron.planner.simulate import simulate
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

CONFIG = LlamaConfig(8, 256, 688, 4, 4, 4096)
SEQUENCE = 256
SLOW = "cpu-slow"
TINY, TINY_SEQUENCE = LlamaConfig(8, 32, 64, 4, 4, 64), 16
UNITS = ("layer", "embedding", "head")


@dataclass(frozen=True, slots=True)
class Run:
    """A strategy, and the ranks that are slowed down."""

    name: str
    strategy: Strategy
    slow: tuple[int, ...] = ()


def split(cut: int, micro_batches: int, first: int = 0, tp: int = 1) -> Pipeline:
    """Two stages: layers [0, cut) and the others."""
    ranks = tuple(range(first, first + 2 * tp))
    last = CONFIG.num_layers - 1
    return Pipeline(micro_batches, 1, (Stage(ranks[:tp], (0, cut - 1)), Stage(ranks[tp:], (cut, last))))


def whole(micro_batches: int, first: int = 0, tp: int = 1) -> Pipeline:
    """One stage."""
    return Pipeline(micro_batches, 1, (Stage(tuple(range(first, first + tp)), (0, CONFIG.num_layers - 1)),))


def runs(ranks: int) -> list[Run]:
    """The strategies: unequal stages, degrees and micro-batches, each schedule, and slowed ranks."""
    found = [Run(f"1 rank, {count} micro-batches", Strategy((whole(count),))) for count in (4, 8)]
    found += [Run(f"pp2 {cut}/{8 - cut}", Strategy((split(cut, 8),))) for cut in (1, 2, 3, 4, 5, 6, 7)]
    found += [Run(f"pp2 4/4, {count} micro-batches", Strategy((split(4, count),))) for count in (2, 4, 16)]
    found.append(Run("pp2 4/4 gpipe", Strategy((split(4, 8),), schedule="gpipe")))
    chunks = Pipeline(8, 1, (Stage((0,), ((0, 1), (4, 5))), Stage((1,), ((2, 3), (6, 7)))))
    found.append(Run("pp2 interleaved", Strategy((chunks,), schedule="interleaved")))
    for one, other in ((4, 4), (6, 2), (2, 6), (8, 8)):
        found.append(Run(f"dp2 {one}+{other}", Strategy((whole(one), whole(other, 1)))))
    found.append(Run("dp2 4+4 zero", Strategy((whole(4), whole(4, 1)), zero=1)))
    found.append(Run("tp2", Strategy((whole(8, tp=2),))))
    found.append(Run("tp2, no sequence parallelism", Strategy((whole(8, tp=2),), sequence_parallel=False)))
    found += [Run(f"pp2 {cut}/{8 - cut}, rank 0 slow", Strategy((split(cut, 8),)), (0,)) for cut in (1, 2, 4)]
    found += [Run(f"pp2 {cut}/{8 - cut}, rank 1 slow", Strategy((split(cut, 8),)), (1,)) for cut in (4, 6, 7)]
    for one, other in ((4, 4), (2, 6)):
        found.append(Run(f"dp2 {one}+{other}, rank 0 slow", Strategy((whole(one), whole(other, 1))), (0,)))
    if ranks >= 4:
        found += [
            Run("pp2 4/4 x dp2", Strategy((split(4, 4), split(4, 4, 2)))),
            Run("pp2 5/3 x dp2 3/5, 5+3", Strategy((split(5, 5), split(3, 3, 2)))),
            Run("pp2 3/5 tp2", Strategy((split(3, 8, tp=2),))),
            Run("tp2 + 1 + 1", Strategy((whole(4, 0, 2), whole(2, 2), whole(2, 3)))),
            Run("pp2 2/6 x dp2, rank 0 slow", Strategy((split(2, 4), split(4, 4, 2))), (0,)),
        ]
    return found


def cluster_of(run: Run) -> Cluster:
    """CPU ranks, the slowed ones of a kind of their own."""
    count = max(run.strategy.ranks) + 1
    kinds = (KINDS["cpu"], replace(KINDS["cpu"], name=SLOW))
    return Cluster(tuple(Device(r, SLOW if r in run.slow else "cpu", 0) for r in range(count)), kinds)


def with_slow_kind(profiles: Profiles, factor: float) -> Profiles:
    """The same device, slower: what is multiplied is what `Slowed` makes longer."""
    slowed = tuple(replace(m, kind=SLOW, seconds=factor * m.seconds) for m in profiles.measurements)
    return replace(
        profiles,
        measurements=profiles.measurements + slowed,
        updates=profiles.updates + tuple(replace(u, kind=SLOW) for u in profiles.updates),
        kept=profiles.kept + tuple(replace(k, kind=SLOW) for k in profiles.kept),
    )


def paced_profile(layer_seconds: float) -> Profiles:
    """What `keep_pace` makes true, at every degree: a layer's time, and nothing for all else."""
    times = {("layer", "forward"): layer_seconds, ("layer", "backward"): 2 * layer_seconds}
    return Profiles(
        measurements=tuple(
            Measurement(
                "cpu", "fp32", unit, phase, tp, 1, TINY_SEQUENCE, TINY_SEQUENCE, times.get((unit, phase), 0.0)
            )  # type: ignore[arg-type]
            for unit in UNITS
            for phase in ("forward", "backward")
            for tp in (1, 2)
        )
    )


def predict(run: Run, profiles: Profiles, config: LlamaConfig = CONFIG, sequence: int = SEQUENCE) -> float:
    """Seconds of a step."""
    graph = trace(Llama(config))
    program = Program.build(graph, run.strategy, config.facts, cluster_of(run))
    options = ("fp32", run.strategy.sequence_parallel, run.strategy.context_parallel)
    return simulate(program, Costs(config, program.cluster, profiles, sequence, *options)).seconds


def train(
    run: Run,
    rounds: int,
    steps: int,
    hinder: Callable[[Session], None],
    config: LlamaConfig = CONFIG,
    sequence: int = SEQUENCE,
) -> float:
    """Seconds of a step on real ranks: the least of the rounds' medians. `hinder` makes a rank slower, or does nothing."""
    model = Llama(config)
    program = Program.build(trace(model), run.strategy, config.facts, cluster_of(run))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"

        def main(rendezvous: Rendezvous) -> None:
            world = World.join(rendezvous, run.strategy.ranks, torch.device("cpu"))
            specs = initial_values(model)
            session = Session(
                program,
                world,
                dict(model.named_modules()),
                lambda slot: initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, 0),
                OptimizerSettings(lr=1e-4, train_iters=10**6),
            )
            hinder(session)
            number, _ = program.pipeline_of(world.rank)
            pipeline = run.strategy.pipelines[number]
            ids = np.random.default_rng(0).integers(0, config.vocab_size, sequence + 1)
            rows = [Piece(row, ids[:-1], ids[1:]) for row in range(pipeline.micro_batch_size)]
            batches = [pack(rows, program.token_multiple(number))] * pipeline.micro_batches
            found = [timed(session, batches, steps) for _ in range(rounds + 1)][1:]
            if world.rank == 0:
                result.write_text(json.dumps(min(found)), encoding="utf-8")
            dist.barrier()
            world.leave()

        if code := fork_ranks(len(run.strategy.ranks), main, ranks=run.strategy.ranks):
            raise RuntimeError(f"{run.name}: a rank ended with exit code {code}")
        return float(json.loads(result.read_text(encoding="utf-8")))


def slow_down(session: Session, factor: float) -> None:
    """Keep the core busy behind every forward and backward, in proportion to what it computed."""
    compute, clock = session.stage.compute, session.clock

    def slowed(action: Action, batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        before = clock.seconds["compute"]
        loss = compute(action, batches)
        until = time.perf_counter() + (factor - 1) * (clock.seconds["compute"] - before)
        while time.perf_counter() < until:
            pass
        return loss

    session.stage.compute = slowed  # type: ignore[method-assign]  # the same call, slower


def keep_pace(session: Session, layer_seconds: float) -> None:
    """Sleep behind every forward and backward until it has lasted as long as its layers should take."""
    compute, clock = session.stage.compute, session.clock
    stage = session.program.stage(session.world.rank)

    def paced(action: Action, batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        first, last = stage.chunks[action.chunk]
        lasts = (last - first + 1) * layer_seconds * (1 if action.kind == "F" else 2)
        began, before = time.perf_counter(), clock.seconds["bubble"]
        loss = compute(action, batches)
        # The pass begins when its input is there, for which the call has waited.
        began += clock.seconds["bubble"] - before
        time.sleep(max(0.0, began + lasts - time.perf_counter()))
        return loss

    session.stage.compute = paced  # type: ignore[method-assign]  # the same call, at its own pace


def timed(session: Session, batches: Sequence[MicroBatch], steps: int) -> float:
    """Median seconds of some steps, from barrier to barrier."""
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        session.step(batches)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the places in order."""
    places = [np.argsort(np.argsort(each)).astype(float) for each in (one, other)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--paced", type=float, default=0.0, metavar="MS")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)
    torch.set_num_threads(1)
    preload(False)
    paced = arguments.paced * 1e-3
    profiles = (
        dict.fromkeys((True, False), paced_profile(paced)) if paced else measured_profiles(arguments, console)
    )
    rows = []
    for run in runs(arguments.ranks):
        if arguments.only not in run.name:
            continue
        own = with_slow_kind(profiles[run.strategy.sequence_parallel], arguments.slow)
        predicted = predict(run, own, *((TINY, TINY_SEQUENCE) if paced else ()))
        slow, factor = run.slow, arguments.slow

        def hinder(session: Session, slow: tuple[int, ...] = slow, factor: float = factor) -> None:
            is_slow = session.world.rank in slow
            if paced:
                keep_pace(session, paced * (factor if is_slow else 1.0))
            elif is_slow:
                slow_down(session, factor)

        took = train(
            run,
            arguments.rounds,
            arguments.steps,
            hinder,
            *((TINY, TINY_SEQUENCE) if paced else (CONFIG, SEQUENCE)),
        )
        rows.append((run.name, took, predicted))
        console.print(f"{run.name}: {1e3 * took:.1f} ms, predicted {1e3 * predicted:.1f}")
    table = Table(title="steps in ms", title_justify="left")
    for column in ("strategy", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, took, predicted in rows:
        table.add_row(
            name, f"{1e3 * took:.1f}", f"{1e3 * predicted:.1f}", f"{100 * (predicted / took - 1):+.1f}%"
        )
    console.print(table)
    errors = [abs(predicted / took - 1) for _, took, predicted in rows]
    correlation = (
        rank_correlation([row[1] for row in rows], [row[2] for row in rows]) if len(rows) > 1 else 1.0
    )
    console.print(
        f"{len(rows)} strategies: mean error {100 * statistics.mean(errors):.1f}%, largest {100 * max(errors):.1f}%, "
        f"rank correlation {correlation:.3f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "correlation": correlation}), encoding="utf-8")


def measured_profiles(arguments: argparse.Namespace, console: Console) -> dict[bool, Profiles]:
    """With sequence parallelism, and without."""
    experiment = Experiment(
        ((1, 1), (2, 1)), ((SEQUENCE, SEQUENCE),), rounds=4 * arguments.rounds, copies=arguments.ranks
    )
    measured = measure(CONFIG, "fp32", "cpu", "cpu", experiment, console.print)
    plain = replace(experiment, degrees=((2, 1),), sequence_parallel=False)
    without = measure(CONFIG, "fp32", "cpu", "cpu", plain, console.print)
    alone = tuple(m for m in measured.measurements if m.tp == 1)
    return {True: measured, False: replace(measured, measurements=alone + without.measurements)}


if __name__ == "__main__":
    main()
