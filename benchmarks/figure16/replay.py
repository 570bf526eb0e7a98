"""A trace replayed with real processes: each configuration's losses beside one device's, and where recoveries took time."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.figure16.nodes import Footprint, Nodes, Watched
from benchmarks.figure16.traces import ROOT, Trace, one_device, write_recipe
from hetero_megatron.report import strategy_text
from hetero_megatron.runtime.checkpoint_files import folder_of
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.strategy import Strategy

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""How far weights and moments may be from one device's at the end."""

_ENDLESS = 1_000_000

_RECOVERY = re.compile(
    r"going on with ranks (?P<ranks>[\d, -]+?)(?: \([\d, -]+ new\))? after iteration (?P<iteration>\d+), in [\d.]+ s "
    r"\((?P<parts>[^)]*)\), (?P<moved>[\d.,]+) MB moved"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the run: its loss and one device's, what it took, and when it was done (seconds since the run began)."""

    iteration: int
    configuration: str
    loss: float
    one_device: float
    seconds: float
    at: float

    @property
    def difference(self) -> float:
        """Of the losses, relative."""
        return abs(self.loss - self.one_device) / abs(self.one_device)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A change of configuration: when ranks were killed or a node was started, and when the next step was done.

    Attributes:
        iteration: the last step before.
        parts: seconds by phase, as the run's log has them.
        as_prepared: whether the run's log shows exactly the prepared strategy.
    """

    before: str
    after: str
    what: str
    ranks: str
    iteration: int
    at: float
    next_step_at: float
    parts: Mapping[str, float]
    moved_mb: float
    as_prepared: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """All that is shown of a trace; `sizes`: ranks by configuration; `weights`: the furthest of master weights and
    moments at the end from one device's, in units of what is allowed, and `furthest_tensor` where that is."""

    title: str
    layers: int
    rows: int
    sizes: Mapping[str, int]
    steps: tuple[Step, ...]
    recoveries: tuple[Recovered, ...]
    footprints: Mapping[str, Footprint]
    weights: float
    furthest_tensor: str

    def of(self, configuration: str) -> tuple[Step, ...]:
        """The steps of a configuration."""
        return tuple(step for step in self.steps if step.configuration == configuration)

    @property
    def furthest(self) -> float:
        """The largest relative difference of a loss from one device's."""
        return max(step.difference for step in self.steps)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, object]) -> "Replay":
        """Back from plain values."""
        found = Replay(**values)  # type: ignore[arg-type]
        steps = tuple(Step(**each) for each in values["steps"])  # type: ignore[attr-defined]
        recoveries = tuple(Recovered(**each) for each in values["recoveries"])  # type: ignore[attr-defined]
        feet = {name: Footprint(**each) for name, each in values["footprints"].items()}  # type: ignore[attr-defined]
        return replace(found, steps=steps, recoveries=recoveries, footprints=feet)


def replay(
    trace: Trace,
    named: Mapping[str, Strategy],
    steps: int,
    folder: Path,
    say: Callable[[str], None],
    patience_s: float = 600.0,
) -> Replay:
    """Run the trace with at least `steps` steps in each configuration, then one device; files stay in `folder`.

    Raises:
        RuntimeError: a run has failed, with the end of what it said.
    """
    first = named[trace.first]
    whole = trace.configurations[-1] if trace.present else trace.first
    prepared = [strategy for name, strategy in named.items() if name != whole]
    recipe = write_recipe(folder, "elastic", trace, named[whole], prepared, _ENDLESS)
    struck: list[tuple[str, float]] = []
    footprints: dict[str, Footprint] = {}
    with Nodes(trace, recipe, folder / "elastic", patience_s) as nodes:
        say(f"{trace.first}: {len(first.ranks)} ranks start")
        nodes.wait_for(1)
        nodes.note_ranks()
        for number, change in enumerate(trace.changes):
            nodes.wait_for(nodes.watched.iteration + steps)
            footprints[trace.configurations[number]] = nodes.footprint()
            if change.node is not None:
                struck.append((f"node {change.node} starts", nodes.start(change.node)))
            else:
                what = "rank" if len(change.lost) == 1 else "ranks"
                shown = (
                    f"{change.lost[0]}" if len(change.lost) == 1 else f"{change.lost[0]}-{change.lost[-1]}"
                )
                struck.append((f"kill -9 of {what} {shown}", nodes.kill(change.lost)))
            say(f"{change.after}: {struck[-1][0]} after iteration {nodes.watched.iteration}")
            nodes.wait_for_recoveries(number + 1)
        nodes.wait_for(nodes.watched.iteration + steps)
        nodes.note_ranks()
        footprints[trace.configurations[-1]] = nodes.footprint()
        nodes.end()
    total = nodes.watched.iteration
    say(f"one device: {total} steps")
    _train(write_recipe(folder, "one_device", trace, one_device(first), (), total))
    reference = Watched(folder / "one_device" / "metrics.jsonl")
    _ = reference.iteration
    log = nodes.output.read_text(errors="replace")
    return _result(trace, named, nodes.watched, reference, struck, log, footprints, folder, total)


def _train(recipe: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetero_megatron", "pretrain", str(recipe)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\none device has failed")


def _result(
    trace: Trace,
    named: Mapping[str, Strategy],
    watched: Watched,
    reference: Watched,
    struck: list[tuple[str, float]],
    log: str,
    footprints: Mapping[str, Footprint],
    folder: Path,
    total: int,
) -> Replay:
    began = min(watched.seen.values()) - watched.steps[1]["step_seconds"]
    found = list(_RECOVERY.finditer(log))
    if len(found) != len(trace.changes):
        raise RuntimeError(f"{log[-8000:]}\n{len(found)} recoveries for {len(trace.changes)} changes")
    recoveries, ends = [], []
    for change, (what, at), line, before in zip(
        trace.changes, struck, found, trace.configurations, strict=False
    ):
        last = int(line["iteration"])
        ends.append(last)
        said = log[
            line.end() : log.find("going on with ranks", line.end()) if line is not found[-1] else None
        ]
        parts = {
            name: float(took) for name, took in (part.rsplit(" ", 1) for part in line["parts"].split(", "))
        }
        recoveries.append(
            Recovered(
                before,
                change.after,
                what,
                line["ranks"],
                last,
                at - began,
                watched.seen[last + 1] - began,
                parts,
                float(line["moved"].replace(",", "")),
                strategy_text(replace(named[change.after], idle_ranks=())) in said,
            )
        )
    steps = tuple(
        Step(
            iteration,
            trace.configurations[sum(iteration > end for end in ends)],
            values["loss"],
            reference.steps[iteration]["loss"],
            values["step_seconds"],
            watched.seen[iteration] - began,
        )
        for iteration, values in sorted(watched.steps.items())
    )
    if [step.iteration for step in steps] != list(range(1, total + 1)):
        raise RuntimeError(f"of {total} steps the metrics have {[step.iteration for step in steps]}")
    layers = len({layer for stage in named[trace.first].pipelines[0].stages for layer in stage.layer_numbers})
    rows = sum(p.micro_batches * p.micro_batch_size for p in named[trace.first].pipelines)
    sizes = {name: len(strategy.ranks) for name, strategy in named.items()}
    weights, tensor = _furthest_weight(folder, total)
    return Replay(trace.title, layers, rows, sizes, steps, tuple(recoveries), footprints, weights, tensor)


def _furthest_weight(folder: Path, iteration: int) -> tuple[float, str]:
    """Of the last checkpoints of both runs, and which tensor has it."""
    run, alone = (SavedState.open(folder_of(folder / name, iteration)) for name in ("elastic", "one_device"))
    found = []
    for name in alone.names:
        for kind in (MASTER, *MOMENTS):
            wanted = alone.read(name, kind)
            allowed = ABSOLUTE + RELATIVE * wanted.abs()
            found.append(
                (float(((run.read(name, kind) - wanted).abs() / allowed).max()), f"{kind} of {name}")
            )
    return max(found)
