"""A 32B model under churn, simulated: how much of an undisturbed cluster's work is done (paper §9 b, Figure 16).

    python -m benchmarks.churn TRACE... [--clusters h20:4,h800:2+h20:4] [--png docs/churn.png]

TRACE: a .csv of `milliseconds,add|remove,name` or a .json of `[{"Time": seconds, "GPUs": count}]`
(`hetero_megatron/planner/churn_trace.py`). Each node of the cluster does what one machine of the trace does, so the
rates per machine are the trace's: once as it is, a whole node at a time, and once with one GPU lost for each machine
that goes. Global batch 64 of 4096 tokens, which stays; every policy makes all steps in order, and again what it falls
back behind a checkpoint. Useful work: steps that count at the end, over those of the whole cluster undisturbed under
its fastest plan. The phases of a recovery are measured (`benchmarks/recovery.py`), moves and steps come from the cost
model, and the rest are the assumptions that are printed. Nothing here ran on GPUs.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.config import count_parameters
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.churn import (
    Change,
    Outcome,
    Policy,
    Ranks,
    Saving,
    daly_interval,
    replay,
)
from hetero_megatron.planner.churn_plans import Plans
from hetero_megatron.planner.churn_policies import Ours, Phases, Restart, Starting, Templates
from hetero_megatron.planner.churn_trace import DEVICE, LOSES, NODE, Trace, on_cluster, read_trace
from hetero_megatron.planner.movement import STATE_BYTES
from hetero_megatron.planner.problem import Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "llama_32b"
ROWS, SEQUENCE = 64, 4096
MEASURED = Phases(detect=0.04, agree=0.001, plan=0.2, specialize=0.11, groups=0.016, resume=0.092)
"""`benchmarks/recovery.py` on CPU with gloo, 4 ranks, idle machine; plan: the planner's limit for a re-plan; specialize:
`benchmarks/specialize.py`, C2. Nobody has measured them on GPUs, where `PAPER` is the other end."""
PAPER = Phases(detect=0.04, agree=0.001, plan=1.2, specialize=7.9, groups=0.0, resume=0.092)
"""Paper Table 5, the slowest of each: planning, and specialization with its communicators; the rest as measured."""
LAUNCH_SECONDS = 60.0
"""Assumed: processes, libraries, communicators of a restart. FlashRecovery (arXiv 2509.03047) reports 150 s for the whole
of a recovery that it made fast, on 4,800 devices."""
LAUNCHES = (30.0, LAUNCH_SECONDS, 150.0)
HOST_BYTES_PER_SECOND = 25e9
"""Assumed: a device to its host's memory, which is what a save holds training up for."""
STORAGE_BYTES_PER_SECOND = 2e9
"""Assumed: a node to and from shared storage."""
OURS, RESTART, FASTEST, TEMPLATES = "ours", "restart, homogeneous", "restart, our plans", "templates"
COLOURS: Mapping[str, str] = {
    OURS: "#D9653B",
    RESTART: "#4C8BC9",
    FASTEST: "#7B62A3",
    TEMPLATES: "#3F8F5F",
}
GREY = "#8C8C8C"


@dataclass(frozen=True)
class Setting:
    """A cluster under a trace, with what all policies share.

    Attributes:
        full_step: seconds of a step of the whole cluster under its fastest plan.
        capacity: what the devices that were there could have done at most, as a share of the whole cluster's.
    """

    name: str
    plans: Plans
    changes: tuple[Change, ...]
    seconds: float
    full_step: float
    capacity: float

    @property
    def horizon(self) -> float:
        """Mean seconds between changes."""
        return self.seconds / max(1, len({change.at for change in self.changes}))

    def starting(self, launch: float) -> Starting:
        """Seconds of a start."""
        cluster = self.plans.full.cluster
        nodes = len({device.node for device in cluster.devices})
        moved = state_bytes() / nodes / STORAGE_BYTES_PER_SECOND
        return Starting(launch, moved, moved)

    def saving(self, mean_between: float) -> Saving:
        """The best checkpoints when the state is lost that often."""
        devices = len(self.plans.full.cluster.devices)
        stall, write = state_bytes() / devices / HOST_BYTES_PER_SECOND, self.starting(0.0).write
        return Saving(daly_interval(stall, write, mean_between), stall, write)

    def policies(self, phases: Phases, launch: float) -> dict[str, Policy]:
        """All of them."""
        starting, horizon = self.starting(launch), self.horizon
        return {
            OURS: Ours(self.plans, phases, starting, horizon),
            TEMPLATES: Templates(self.plans, phases, starting, horizon),
            FASTEST: Restart(self.plans, starting, horizon, "fastest"),
            RESTART: Restart(self.plans, starting, horizon),
        }

    def run(self, policy: Policy) -> tuple[Outcome, Saving]:
        """With the checkpoint interval that fits how often this policy needs one, which a first replay tells."""
        first = replay(self.changes, self.seconds, policy)
        saving = self.saving(self.seconds / max(1, first.restarts))
        return replay(self.changes, self.seconds, policy, saving), saving

    def share(self, outcome: Outcome) -> float:
        """Useful work over the undisturbed cluster's."""
        return outcome.steps * self.full_step / self.seconds


def state_bytes() -> float:
    """Of a checkpoint: master weights and moments."""
    return float(count_parameters(PRESETS[MODEL]) * STATE_BYTES)


def cluster_of(text: str) -> Cluster:
    """`h800:2+h20:4`: nodes by kind."""
    nodes = dict(part.split(":") for part in text.split("+"))
    return Cluster.of_nodes({kind: int(count) for kind, count in nodes.items()})


def present_sets(changes: Sequence[Change]) -> list[Ranks]:
    """Who is there after each change."""
    found, present = [], Ranks()
    for change in changes:
        present = (present - change.lost) | change.joined
        found.append(present)
    return found


def capacity(changes: Sequence[Change], seconds: float, speeds: Mapping[int, float]) -> float:
    """The share of all devices' work that those who were there could do; `speeds` by rank."""
    done = 0.0
    ends = [*(change.at for change in changes[1:]), seconds]
    for change, end, present in zip(changes, ends, present_sets(changes), strict=True):
        done += sum(speeds[rank] for rank in present) * (min(end, seconds) - min(change.at, seconds))
    return done / (seconds * sum(speeds.values()))


def setting(plans: Plans, trace: Trace, loses: str, processes: int) -> Setting:
    """A trace on a cluster; what has to be planned for it is planned."""
    cluster = plans.full.cluster
    changes = on_cluster(trace, cluster, loses)
    everyone = Ranks(cluster.ranks)
    plans.prepare([everyone, *present_sets(changes)], processes)
    fastest = plans.of(everyone).fastest
    assert fastest is not None, "the whole cluster has a plan"
    drafts, blocks = plans.plan.drafts, plans.plan.problem.blocks
    speed = {kind: max(drafts.speed(block) / block.ranks for block in own) for kind, own in blocks.items()}
    speeds = {rank: speed[cluster.kind(rank).name] for rank in cluster.ranks}
    return Setting(
        loses,
        plans,
        changes,
        trace.seconds,
        fastest.step_seconds,
        capacity(changes, trace.seconds, speeds),
    )


def table(title: str, own: Setting, results: Mapping[str, tuple[Outcome, Saving]]) -> Table:
    """A row per policy."""
    shown = Table(title=title, title_justify="left")
    columns = ("", "useful work", "lost", "paused", "saves", "waiting", "recoveries", "joins", "restarts")
    for column in (*columns, "steps", "save every"):
        shown.add_column(column, justify="right" if column else "left")
    for name, (found, saving) in results.items():
        parts = (found.lost, found.paused, found.saving, found.waiting)
        shown.add_row(
            name,
            f"{100 * own.share(found):.1f}%",
            *(f"{100 * part / own.seconds:.1f}%" for part in parts),
            *(str(count) for count in (found.recoveries, found.joins, found.restarts, found.steps)),
            f"{saving.interval:.0f} s",
        )
    shown.add_row("all who were there, at their best", f"{100 * own.capacity:.1f}%")
    return shown


def draw(
    panels: Sequence[tuple[str, Setting, Mapping[str, tuple[Outcome, Saving]]]], columns: int, path: Path
) -> None:
    """Useful work over time, a panel per setting."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 4.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, own, results) in zip(grid.flat, panels, strict=False):
        _panel(axes, title, own, results)
    figure.savefig(path, dpi=110)


def _panel(axes: "Axes", title: str, own: Setting, results: Mapping[str, tuple[Outcome, Saving]]) -> None:
    hours = own.seconds / 3600
    axes.plot((0, hours), (0, hours), color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(hours, hours, " undisturbed", color=GREY, va="center", fontsize=9)
    written = float("inf")
    ordered = sorted(results.items(), key=lambda each: -own.share(each[1][0]))
    for name, (found, _) in ordered:
        times = [at / 3600 for at, _ in found.curve]
        done = [steps * own.full_step / 3600 for _, steps in found.curve]
        axes.plot(times, done, color=COLOURS[name], linewidth=1.8)
        # Names of lines that end close together stand one below the other.
        written = min(done[-1], written - 0.05 * hours)
        label = f" {name} {100 * own.share(found):.0f}%"
        axes.text(hours, written, label, color=COLOURS[name], va="center", fontsize=9)
    axes.set_xlim(0, hours * 1.42)
    axes.set_xticks(range(0, int(hours) + 1, 2))
    axes.set_ylim(0, hours * 1.03)
    axes.set_xlabel("hours")
    axes.set_ylabel("hours of the undisturbed cluster's work")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def assumptions(own: Setting) -> str:
    """One paragraph of what is assumed."""
    starting, saving = own.starting(LAUNCH_SECONDS), own.saving(own.seconds)
    return (
        f"assumed: restart {starting.launch:.0f} s + {starting.read:.0f} s to read {state_bytes() / 1e9:.0f} GB; a save "
        f"holds training up for {saving.stall:.2f} s and is complete {saving.write:.0f} s later; our recovery "
        f"{MEASURED.total:.2f} s + the move; step of the whole cluster {own.full_step:.2f} s; a change every "
        f"{own.horizon:.0f} s"
    )


def sensitivity(own: Setting) -> Table:
    """Useful work with other costs of a restart, and with the paper's phases."""
    shown = Table(title="useful work with other costs of a restart, or of a recovery", title_justify="left")
    shown.add_column("")
    names = list(own.policies(MEASURED, LAUNCH_SECONDS))
    for name in names:
        shown.add_column(name, justify="right")
    rows = [(f"restart {launch:.0f} s", MEASURED, launch) for launch in LAUNCHES]
    rows.append((f"recovery {PAPER.total:.1f} s (paper Table 5)", PAPER, LAUNCH_SECONDS))
    for told, phases, launch in rows:
        policies = own.policies(phases, launch)
        shown.add_row(told, *(f"{100 * own.share(own.run(policies[name])[0]):.1f}%" for name in names))
    return shown


def main() -> None:
    """Print a table per cluster, trace and kind of loss; draw the first trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--clusters", default="h20:4,h800:2+h20:4")
    parser.add_argument("--loses", default=",".join(LOSES), help=f"{NODE}, {DEVICE} or both")
    parser.add_argument("--processes", type=int, default=2, help="that plan")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, began = Console(highlight=False, width=150), time.perf_counter()
    panels, told = [], {}
    for clusters in arguments.clusters.split(","):
        plans = Plans(Problem(PRESETS[MODEL], cluster_of(clusters), ROWS, SEQUENCE))
        for number, path in enumerate(arguments.traces):
            trace = read_trace(path)
            for loses in arguments.loses.split(","):
                own = setting(plans, trace, loses, arguments.processes)
                results = {
                    name: own.run(policy) for name, policy in own.policies(MEASURED, LAUNCH_SECONDS).items()
                }
                title = f"{clusters}, {path.stem}, {own.seconds / 3600:.1f} h, a loss takes a {loses}"
                console.print(table(title, own, results))
                told[title] = {name: own.share(found) for name, (found, _) in results.items()}
                if not number:
                    panels.append((title, own, results))
                    console.print(assumptions(own), soft_wrap=True)
                    console.print(sensitivity(own))
    if arguments.png:
        draw(panels, len(arguments.loses.split(",")), arguments.png)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=2), encoding="utf-8")
    console.print(f"simulated, nothing ran on GPUs; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
