"""Simulated steps of a 32B model on documents of mixed lengths: ours against four others (paper §9 c, Figure 17).

    python -m benchmarks.mixed_lengths FILE.npz [--seeds 101,202,303] [--context 32768,16384] [--steps 40] [--kind h20]

FILE.npz holds the lengths of a corpus's documents in tokens, as `lengths`. The planner sees steps drawn by its own seed;
every policy is then timed on steps of other seeds, by the same cost model, gradients, update and switches included.
Longer documents are cut to the context. The others are tuned on the very steps that they are timed on: the best
homogeneous strategy and HotSPa's intervals are chosen with them in view; ours are not. Two rows that are not among the
four: HotSPa's intervals of paper Table 14 as they stand there, and the best homogeneous strategy with our dispatch,
which shows how much of the gain is the dispatch and how much the set of strategies.

One core; no process group. CPU seconds of planning, and of choice and dispatch of one step, are printed.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.hotspa import HOTSPA, Buckets, plan_buckets
from hetero_megatron.planner.layouts import Layouts
from hetero_megatron.planner.length_sample import SEED, Lengths, LengthSample
from hetero_megatron.planner.mixed import MixedPlan, plan_mixed
from hetero_megatron.planner.mixed_baselines import best_windows, homogeneous, paper_strategies
from hetero_megatron.planner.mixed_floor import floor_seconds
from hetero_megatron.planner.mixed_others import TUNED
from hetero_megatron.planner.small_batches import SmallBatchCosts

OURS = "ours"
PACKED, VARLEN = "homogeneous, packed windows", "homogeneous, variable-length attention"
BUCKETS, PAPER = "HotSPa's buckets, the best intervals", "paper's A and B, our dispatch"
FOUR = (PACKED, VARLEN, BUCKETS, PAPER)
TABLE14, DISPATCHED = "HotSPa's buckets as in Table 14", "best homogeneous strategy, our dispatch"


@dataclass
class Timed:
    """A policy: its mean step and a note for every seed."""

    means: list[float]
    note: str


def chosen(
    named: Sequence[NamedStrategy], costs: SmallBatchCosts, steps: Sequence[Lengths], switch: float | None
) -> tuple[float, str, float]:
    """Mean step, what was chosen how often, and the most CPU seconds of choosing one step."""
    chooser = StepChooser(named, costs, switch)
    took = []
    for step in steps:
        began = time.process_time()
        chooser.candidates(step.tolist())
        took.append(time.process_time() - began)
    found = chooser.choose_many([step.tolist() for step in steps])
    counts = Counter(named[each.strategy].name for each in found)
    switches = sum(each.switch_seconds > 0 for each in found)
    gap = np.mean(
        [max(each.candidate.report.seconds) / each.candidate.report.lower_bound - 1 for each in found]
    )
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    note = f"{told}; {switches} switches; slowest pipeline {100 * gap:.1f}% above its bound"
    return float(np.mean([each.total_seconds for each in found])), note, max(took)


def policies(
    layouts: Layouts, plan: MixedPlan, steps: Sequence[Lengths], switch: float | None, costs: SmallBatchCosts
) -> tuple[dict[str, tuple[float, str]], float]:
    """Mean step and a note of each policy on these steps, and the most CPU seconds of choosing one of them."""
    found: dict[str, tuple[float, str]] = {}
    for name, varlen in ((PACKED, False), (VARLEN, True)):
        best = best_windows(layouts, steps, varlen)
        found[name] = best.seconds, str(best)
    table14 = Buckets(layouts, HOTSPA[layouts.context], switch)
    planned = plan_buckets(layouts, steps[:TUNED], switch)
    found[TABLE14] = table14.mean(steps), str(table14)
    better = min((planned, table14), key=lambda each: each.mean(steps))
    found[BUCKETS] = better.mean(steps), str(better)
    found[PAPER] = chosen(paper_strategies(layouts, steps), costs, steps, switch)[:2]
    # Every homogeneous strategy under our dispatch on a few steps, the best three of them on all.
    own = [(layout, NamedStrategy(str(layout), strategy)) for layout, strategy in homogeneous(layouts)]
    quick = sorted((chosen([each], costs, steps[:2], switch)[0], n) for n, (_, each) in enumerate(own))
    found[DISPATCHED] = min(chosen([own[n][1]], costs, steps, switch)[:2] for _, n in quick[:3])
    seconds, note, took = chosen(plan.named, costs, steps, switch)
    found[OURS] = seconds, note
    return found, took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--seeds", default="101,202,303", help="of the steps that are timed")
    parser.add_argument("--context", default="32768,16384")
    parser.add_argument("--kind", default="h20", help="kind of the 32 devices")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens per step")
    parser.add_argument("--steps", type=int, default=40, help="per seed")
    parser.add_argument("--switch-seconds", type=float, help="of every switch; left out: the cost model's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = np.load(arguments.lengths)["lengths"]
    seeds = [int(each) for each in arguments.seeds.split(",")]
    if SEED in seeds:
        parser.error(f"--seeds: {SEED} is what the planner sees; take others")
    results = {}
    for context in map(int, arguments.context.split(",")):
        costs = SmallBatchCosts(
            PRESETS["llama_32b"], Cluster.of_nodes({arguments.kind: 4}), None, context, "bf16"
        )
        layouts = Layouts(costs, context)
        began = time.process_time()
        plan = plan_mixed(costs, lengths, arguments.tokens)
        planning = time.process_time() - began
        timed: dict[str, Timed] = {}
        floors, took = [], 0.0
        for seed in seeds:
            steps = LengthSample.draw(lengths, context, arguments.tokens, arguments.steps, seed).steps
            found, longest = policies(layouts, plan, steps, arguments.switch_seconds, costs)
            took = max(took, longest)
            floors.append(float(np.mean(floor_seconds(layouts, steps))))
            for name, (seconds, note) in found.items():
                timed.setdefault(name, Timed([], note)).means.append(seconds)
        title = f"context {context}, 32 {arguments.kind}, {arguments.steps} steps of each of seeds {arguments.seeds}"
        results[context] = report(title, timed, floors)
        console = Console(highlight=False, width=150)
        for each in plan.strategies:
            console.print(f"  {each.named.name}: up to {each.named.max_length or context} tokens: {each}")
        console.print(
            f"CPU seconds on one core: planning {planning:.1f} (limit 10), choice and dispatch of a step "
            f"{took:.3f} at most (limit 0.3)\n"
        )
        results[context] |= {"plan_seconds": planning, "choose_seconds": took}
    if arguments.json:
        arguments.json.write_text(json.dumps(results), encoding="utf-8")


def report(title: str, timed: dict[str, Timed], floors: Sequence[float]) -> dict[str, object]:
    """Print the table; its numbers."""
    table = Table(title=title, title_justify="left")
    for column in (
        "policy",
        "mean step",
        "our gain",
        "least to most",
        "above the floor",
        "of the first seed",
    ):
        table.add_column(column, justify="left" if column in ("policy", "of the first seed") else "right")
    ours, floor = np.array(timed[OURS].means), np.array(floors)
    for name, each in timed.items():
        means = np.array(each.means)
        gains = 100 * (means / ours - 1)
        told = (
            ("", "") if name == OURS else (f"{gains.mean():.1f}%", f"{gains.min():.1f} to {gains.max():.1f}%")
        )
        table.add_row(
            name + (" *" if name in FOUR else ""),
            f"{means.mean():.3f} s",
            *told,
            f"{100 * (means / floor - 1).mean():.1f}%",
            each.note,
        )
    table.add_row("floor: no bubble, no rest, no exchange", f"{floor.mean():.3f} s", "", "", "", "")
    console = Console(highlight=False, width=150)
    console.print(table)
    lost = [name for name in FOUR if (np.array(timed[name].means) <= ours).any()]
    told = (
        f"not better on every seed than: {', '.join(lost)}"
        if lost
        else "better than all four (*) on every seed"
    )
    console.print(f"ours is {told}; {100 * (ours / floor - 1).mean():.1f}% above the no-bubble floor")
    return {"floor": list(floors), "mean": {name: each.means for name, each in timed.items()}, "lost": lost}


if __name__ == "__main__":
    main()
