"""Simulated steps of a 32B model on documents of mixed lengths: ours against four others (paper §9 c, Figure 17).

    python benchmarks/mixed_lengths.py --lengths FILE.npz [--context 32768,16384] [--kind h20] [--steps 40]

FILE.npz holds the lengths of a corpus's documents in tokens, as `lengths`. Steps are drawn from it by a seed of their
own, other than the planner's; longer documents are cut to the context. Every policy is timed by the same cost model,
gradients, update and switches included. One core; no process group.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.layouts import Layouts
from hetero_megatron.planner.length_sample import Lengths, LengthSample
from hetero_megatron.planner.mixed import MixedPlan, plan_mixed
from hetero_megatron.planner.mixed_baselines import HOTSPA, Buckets, best_windows, paper_strategies
from hetero_megatron.planner.mixed_floor import floor_seconds
from hetero_megatron.planner.small_batches import SmallBatchCosts

EVALUATED = 77


def chosen(
    named: Sequence[NamedStrategy], costs: SmallBatchCosts, steps: Sequence[Lengths], switch: float | None
) -> tuple[float, str, float]:
    """Mean step, what was chosen how often, and seconds of choosing one step."""
    chooser = StepChooser(named, costs, switch)
    began = time.process_time()
    found = chooser.choose_many([step.tolist() for step in steps])
    took = (time.process_time() - began) / len(steps)
    counts = Counter(named[each.strategy].name for each in found)
    switches = sum(each.switch_seconds > 0 for each in found)
    gap = np.mean(
        [max(each.candidate.report.seconds) / each.candidate.report.lower_bound - 1 for each in found]
    )
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    note = f"{told}; {switches} switches; slowest pipeline {100 * gap:.1f}% above its bound"
    return float(np.mean([each.total_seconds for each in found])), note, took


def rows_of(
    layouts: Layouts, plan: MixedPlan, steps: Sequence[Lengths], switch: float | None, costs: SmallBatchCosts
) -> tuple[list[tuple[str, float, str]], float, float]:
    """(policy, mean step, note) of each, the mean floor, and seconds of choosing a step."""
    rows = []
    for name, varlen in (
        ("homogeneous, packed windows", False),
        ("homogeneous, variable-length attention", True),
    ):
        best = best_windows(layouts, steps, varlen)
        rows.append((name, best.seconds, str(best)))
    buckets = Buckets(layouts, HOTSPA[layouts.context], switch)
    pairs = [buckets.seconds(step.tolist()) for step in steps]
    note = f"of it {np.mean([moved for _, moved in pairs]):.2f} s switches"
    rows.append(("HotSPa's buckets (Table 14)", float(np.mean([sum(pair) for pair in pairs])), note))
    paper = paper_strategies(layouts, steps)
    table = "15" if layouts.context == 32768 else "16"
    rows.append((f"paper's A and B (Table {table}), our dispatch", *chosen(paper, costs, steps, switch)[:2]))
    seconds, note, took = chosen(plan.named, costs, steps, switch)
    rows.append(("ours", seconds, note))
    return rows, float(np.mean(floor_seconds(layouts, steps))), took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--context", default="32768,16384")
    parser.add_argument("--kind", default="h20", help="kind of the 32 devices")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens per step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--switch-seconds", type=float, help="of every switch; left out: the cost model's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = np.load(arguments.lengths)["lengths"]
    console, results = Console(highlight=False, width=140), {}
    for context in map(int, arguments.context.split(",")):
        costs = SmallBatchCosts(
            PRESETS["llama_32b"], Cluster.of_nodes({arguments.kind: 4}), None, context, "bf16"
        )
        layouts = Layouts(costs, context)
        began = time.process_time()
        plan = plan_mixed(costs, lengths, arguments.tokens)
        planning = time.process_time() - began
        sample = LengthSample.draw(lengths, context, arguments.tokens, arguments.steps, EVALUATED)
        rows, floor, took = rows_of(layouts, plan, sample.steps, arguments.switch_seconds, costs)
        ours = rows[-1][1]
        table = Table(
            title=f"context {context}, 32 {arguments.kind}, {arguments.steps} steps", title_justify="left"
        )
        for column in ("policy", "mean step", "ours is", "above the floor", ""):
            table.add_column(
                column, justify="right" if column in ("mean step", "ours is", "above the floor") else "left"
            )
        for name, seconds, note in rows:
            table.add_row(
                name,
                f"{seconds:.2f} s",
                "" if name == "ours" else f"{seconds / ours:.2f}x",
                f"{100 * (seconds / floor - 1):.1f}%",
                note,
            )
        table.add_row("floor: no bubble, no rest, no exchange", f"{floor:.2f} s", "", "", "")
        console.print(table)
        for each in plan.strategies:
            told = each.named.max_length or context
            console.print(f"  {each.named.name}: up to {told} tokens: {each}")
        console.print(
            f"planning {planning:.1f} s, choice and dispatch {1e3 * took:.0f} ms per step (CPU time, one core)"
        )
        results[context] = {"rows": rows, "floor": floor, "plan_seconds": planning, "choose_seconds": took}
    if arguments.json:
        arguments.json.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
