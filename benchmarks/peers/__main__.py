"""Our training step against PyTorch's own stack (DTensor, torch.distributed.pipelining, DDP) on this machine's cores.

    python -m benchmarks.peers [--layouts TP2,PP2xTP2] [--rounds 5] [--steps 3] [--json FILE]

Both sides train the same small Llama (8 layers, hidden 256, vocabulary 4096) in FP32 on the same rows from the same
initial weights: 16 micro-batches of 256 tokens a step. They share forked ranks with one thread each under
SCHED_BATCH, and run in turn, round by round; the losses of every step must be equal to 5 digits. `speed` is their
time over ours, above 1 where ours is faster. `of limit` is the share of the matrix-multiply rate that the cores in
use reach at the model's shapes, measured in every round. Below stand the parts of our step.
"""

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of every rank would import it
from rich.console import Console
from rich.table import Table

from benchmarks.peers.case import LAYOUTS, Case, Layout
from benchmarks.peers.rounds import Measured, cores, measure
from hetero_megatron.models.config import flops_per_token
from hetero_megatron.runtime.clock import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layouts", default=",".join(LAYOUTS), help=f"comma-separated, of: {', '.join(LAYOUTS)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds per layout (5)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each side in a round (3)")
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="our tensor parallelism by all-gather and reduce-scatter instead of all-reduce (no)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.layouts.split(",") if name not in LAYOUTS]
    if unknown:
        parser.error(f"unknown layout {unknown[0]!r}; known: {', '.join(LAYOUTS)}")
    console, case, found = Console(), Case(), {}
    if not console.is_terminal:
        console = Console(width=120)
    for layout in (LAYOUTS[name] for name in arguments.layouts.split(",")):
        with console.status(f"{layout.name} ..."):
            measured = measure(case, layout, arguments.rounds, arguments.steps, arguments.sequence_parallel)
        found[layout] = measured
    mode = "all-gather + reduce-scatter" if arguments.sequence_parallel else "all-reduce"
    console.print(speed_table(case, found))
    console.print(parts_table(found))
    console.print(
        f"PyTorch {torch.__version__}, {cores()} cores, load {os.getloadavg()[0]:.1f}. "
        f"Our tensor parallelism: {mode}; theirs: all-reduce (DTensor)."
    )
    if arguments.json:
        numbers = {layout.name: summary(case, layout, m) | asdict(m) for layout, m in found.items()}
        arguments.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")


def ratios(measured: Measured) -> list[float]:
    """Their time over ours, per round."""
    return [b / a for a, b in zip(measured.seconds["ours"], measured.seconds["theirs"], strict=True)]


def summary(case: Case, layout: Layout, measured: Measured) -> dict[str, float]:
    """The numbers of a row of the table."""
    work = flops_per_token(case.config, case.sequence) * case.tokens_per_step / 1e9
    limit = statistics.median(measured.limit)
    found = {"speed": statistics.median(ratios(measured)), "limit_gflops": limit, "load": os.getloadavg()[0]}
    for side in ("ours", "theirs"):
        seconds = statistics.median(measured.seconds[side])
        found[f"{side}_seconds"] = seconds
        found[f"{side}_tokens_per_second"] = case.tokens_per_step / seconds
        found[f"{side}_of_limit"] = work / seconds / limit
        found[f"{side}_cpu_seconds"] = statistics.median(measured.cpu_seconds[side])
    return found


def speed_table(case: Case, found: dict[Layout, Measured]) -> Table:
    table = Table(title="ours against PyTorch's own stack", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for column in (
        "speed",
        "from",
        "to",
        "tokens/s",
        "theirs",
        "of limit",
        "theirs",
        "CPU s",
        "theirs",
        "limit",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for layout, measured in found.items():
        s, each = summary(case, layout, measured), ratios(measured)
        table.add_row(
            layout.name,
            f"{s['speed']:.2f}",
            f"{min(each):.2f}",
            f"{max(each):.2f}",
            f"{s['ours_tokens_per_second']:.0f}",
            f"{s['theirs_tokens_per_second']:.0f}",
            f"{s['ours_of_limit']:.0%}",
            f"{s['theirs_of_limit']:.0%}",
            f"{s['ours_cpu_seconds']:.2f}",
            f"{s['theirs_cpu_seconds']:.2f}",
            f"{s['limit_gflops']:.0f}",
        )
    return table


def parts_table(found: dict[Layout, Measured]) -> Table:
    """What the step's own clock says; the rest is the optimizer, zeroing gradients and checks."""
    table = Table(title="our step, milliseconds, average of the ranks", title_justify="left")
    table.add_column("layout")
    for column in ("step", *KINDS, "optimizer, rest"):
        table.add_column(column, justify="right")
    for layout, measured in found.items():
        part = {kind: statistics.median(p[kind] for p in measured.parts) for kind in ("step", *KINDS)}
        rest = part["step"] - sum(part[kind] for kind in KINDS)
        table.add_row(layout.name, *(f"{1e3 * value:.0f}" for value in (*part.values(), rest)))
    return table


if __name__ == "__main__":
    main()
