"""A real gain on this machine: two CPU ranks, one slowed down about four times, and the plan made for them.

    python -m benchmarks.heterogeneous [--by quota|spin] [--share 0.25] [--rounds 3] [--steps 3] [--layers 10] [--rows 16]

First both kinds of rank are profiled, as `hetero-megatron profile` does: the fast one, and the slow one as slow as it is
going to be. The planner gets that profile, the model and two devices of two kinds. Then its plan trains on forked ranks,
beside the best homogeneous two-stage pipeline (equal layers, the slow rank first or last) and the planner's best single
pipeline. Prints measured and predicted steps, and what the plan gains.

`quota` slows the computing thread of the rank through a cgroup (version 1, with the right to write there): a run-time
of 1 ms out of 4 for a share of 0.25, while its communication threads run at full speed, as beside a slow GPU. Where that
is not allowed, and with `spin`, the rank keeps its core busy behind every pass instead; then the profile of the slow rank
is the fast one's, multiplied. A measured step is the least of the rounds' medians. Needs two free cores.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.simulator import SLOW, Run, cluster_of, predict, slow_down, train, with_slow_kind
from hetero_megatron.cluster import Cluster
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.measure import Experiment, measure
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.runtime.launch import preload
from hetero_megatron.runtime.session import Session
from hetero_megatron.stragglers import spelt
from hetero_megatron.strategy import Pipeline, Stage, Strategy

SEQUENCE = 256
PERIOD_US, LEAST_QUOTA_US = 4000, 1000
GROUPS = Path("/sys/fs/cgroup/cpu")
SLOW_RANK = 1


class Quota:
    """A cgroup whose threads run for a share of the time, in periods of 4 ms."""

    def __init__(self, share: float) -> None:
        """Raises OSError where this process may not make one."""
        self._group = GROUPS / f"hetero-megatron-{time.time_ns()}"
        self._group.mkdir()
        self._write("cpu.cfs_period_us", PERIOD_US)
        self._write("cpu.cfs_quota_us", max(LEAST_QUOTA_US, round(share * PERIOD_US)))

    def _write(self, name: str, value: int) -> None:
        (self._group / name).write_text(f"{value}\n", encoding="ascii")

    def enter(self) -> None:
        """The calling thread is slow from now on, and every process and thread that it starts."""
        self._write("tasks", threading.get_native_id())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is slow meanwhile."""
        self.enter()
        try:
            yield
        finally:
            (GROUPS / "tasks").write_text(f"{threading.get_native_id()}\n", encoding="ascii")

    def close(self) -> None:
        """Take the group away; nobody may be in it."""
        self._group.rmdir()


def multiplication_seconds() -> float:
    """How long some matrix products take here and now."""
    one = torch.rand(256, 256)
    one @ one
    began = time.perf_counter()
    for _ in range(1000):
        one @ one
    return time.perf_counter() - began


def profiled(config: LlamaConfig, rounds: int, say: Callable[[str], None]) -> Profiles:
    """A rank that computes alone; messages and collectives of two ranks."""
    experiment = Experiment(((1, 1),), ((SEQUENCE, SEQUENCE),), rounds=rounds)
    alone = measure(config, "fp32", "cpu", "cpu", experiment, say)
    pair = measure(config, "fp32", "cpu", "cpu", replace(experiment, copies=2), say)
    return replace(alone, transfers=pair.transfers)


def profiled_slow(config: LlamaConfig, rounds: int, quota: Quota, say: Callable[[str], None]) -> Profiles:
    """The same rank under its quota."""
    experiment = Experiment(((1, 1),), ((SEQUENCE, SEQUENCE),), rounds=rounds)
    with quota.inside():
        return measure(config, "fp32", SLOW, "cpu", experiment, say)


def joined(fast: Profiles, slow: Profiles) -> Profiles:
    """One profile of both kinds."""
    return replace(
        fast,
        measurements=fast.measurements + slow.measurements,
        updates=fast.updates + slow.updates,
        kept=fast.kept + slow.kept,
        reserved_bytes=dict(fast.reserved_bytes) | dict(slow.reserved_bytes),
    )


def even_pipelines(layers: int, rows: int) -> list[Strategy]:
    """Two stages of equally many layers; the slow rank first, and last."""
    half = layers // 2
    return [
        Strategy((Pipeline(rows, 1, (Stage((one,), (0, half - 1)), Stage((other,), (half, layers - 1)))),))
        for one, other in ((0, 1), (1, 0))
    ]


def planned(config: LlamaConfig, cluster: Cluster, profile: Profiles, rows: int) -> tuple[Plan, Plan]:
    """The plan for both devices, and the best one that is a single pipeline."""
    costs = Costs(config, cluster, profile, SEQUENCE, "fp32")
    free = Choices(micro_batch_sizes=(1,))
    plans = [
        make_plan(Problem(config, cluster, rows, SEQUENCE, choices), costs)
        for choices in (free, replace(free, pipelines=(1,)))
    ]
    return plans[0], plans[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--by", choices=("quota", "spin"), default="quota")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16)
    arguments = parser.parse_args()
    console = Console(highlight=False, width=110)
    torch.set_num_threads(1)
    preload(False)
    config = LlamaConfig(arguments.layers, 256, 688, 4, 4, 4096)
    quota: Quota | None = None
    if arguments.by == "quota":
        try:
            quota = Quota(arguments.share)
        except OSError as error:
            console.print(f"no quota ({error.strerror}): the slow rank spins behind every pass instead")
    try:
        compare(arguments, config, quota, console)
    finally:
        if quota is not None:
            quota.close()


def compare(
    arguments: argparse.Namespace, config: LlamaConfig, quota: Quota | None, console: Console
) -> None:
    """Profile, plan, train and print."""
    fast, factor = profiled(config, 4 * arguments.rounds, console.print), 1 / arguments.share
    if quota is not None:
        usual = multiplication_seconds()
        with quota.inside():
            held = multiplication_seconds() / usual
        if held < factor / 2:
            console.print(
                f"the quota slows down by {held:.2f} only: the slow rank spins behind every pass instead"
            )
            quota = None
        else:
            factor = held
    if quota is None:
        profile = with_slow_kind(fast, factor)
    else:
        profile = joined(fast, profiled_slow(config, 4 * arguments.rounds, quota, console.print))
    console.print(f"rank {SLOW_RANK} is slower by {factor:.2f} times, by {'quota' if quota else 'spinning'}")

    def hinder(session: Session) -> None:
        if session.world.rank != SLOW_RANK:
            return
        if quota is None:
            slow_down(session, factor)
        else:
            quota.enter()

    rows, slow = arguments.rows, (SLOW_RANK,)
    order = ("last", "first") if SLOW_RANK == 1 else ("first", "last")
    even = [
        Run(f"equal stages, slow {place}", strategy, slow)
        for place, strategy in zip(order, even_pipelines(config.num_layers, rows), strict=True)
    ]
    cluster = cluster_of(even[0])
    plan, single = planned(config, cluster, profile, rows)
    runs = [Run("the plan", plan.strategy, slow)]
    if single.strategy != plan.strategy:
        runs.append(Run("the plan of one pipeline", single.strategy, slow))
    table = Table(title=f"seconds of a step, {rows} rows of {SEQUENCE} tokens", title_justify="left")
    for column in ("strategy", "", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column in ("strategy", "") else "right")
    measured: dict[str, tuple[float, float]] = {}
    for run in (*runs, *even):
        predicted = predict(run, profile, config, SEQUENCE)
        took = train(run, arguments.rounds, arguments.steps, hinder, config, SEQUENCE)
        measured[run.name] = took, predicted
        table.add_row(
            run.name,
            spelt(run.strategy),
            f"{took:.3f}",
            f"{predicted:.3f}",
            f"{100 * (predicted / took - 1):+.1f}%",
        )
    console.print(table)
    best = min(measured[run.name][0] for run in even)
    for run in runs:
        took, predicted = measured[run.name]
        console.print(
            f"{run.name}: {best / took:.2f} times as fast as the best homogeneous two-stage pipeline; "
            f"prediction off by {100 * abs(predicted / took - 1):.1f}%"
        )
    console.print(f"bound of the planner for this machine: {plan.bound_seconds:.3f} s")


if __name__ == "__main__":
    main()
