"""The elastic traces of the paper's Figure 16 with real processes, at reduced width, on this machine's CPU.

    python -m benchmarks.figure16 [--trace h20|mixed|grow ...] [--layers 12] [--rows 16] [--steps 4]

h20: C1 (32 ranks) -> C2 (31) -> C3 (24). mixed: C4 (48) -> C5 (40) -> C6 (39) -> C7 (32). grow: C3 (24) -> C1 (32).
One `hetero-megatron pretrain --elastic` per node of 8 ranks, which are killed with kill -9 from outside, or started
later; strategies are those of `recipes/paper` (`elastic.plans`). `--layers 60 --rows 64` has all of their layers and
rows, and takes minutes. Prints each configuration's losses beside those of one device, and where the time of each recovery
went. Seconds on a CPU at this width say nothing about GPUs.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.figure16.picture import draw
from benchmarks.figure16.replay import Replay, replay
from benchmarks.figure16.traces import TRACES, strategies


def main() -> None:
    """Replay, print, draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figure16",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", action="append", choices=TRACES, help="may be repeated; left out: all")
    parser.add_argument(
        "--layers", type=int, default=12, help="about so many, up to the 60 of the 32B model (12)"
    )
    parser.add_argument("--rows", type=int, default=16, help="of a step, up to the 64 of the paper (16)")
    parser.add_argument("--steps", type=int, default=4, help="in each configuration, at least (4)")
    parser.add_argument("--png", type=Path, help="where the picture is written, such as docs/figure16.png")
    parser.add_argument(
        "--json", type=Path, help="where the results are kept; traces not run now are taken from it"
    )
    arguments = parser.parse_args()
    found: dict[str, Replay] = {}
    if arguments.json and arguments.json.exists():
        found = {
            name: Replay.from_json(values) for name, values in json.loads(arguments.json.read_text()).items()
        }
    for name in arguments.trace or TRACES:
        trace = TRACES[name]
        with tempfile.TemporaryDirectory(prefix="figure16-") as folder:
            found[name] = replay(
                trace,
                strategies(trace, arguments.layers, arguments.rows),
                arguments.steps,
                Path(folder),
                _say,
            )
        show(found[name])
        if arguments.json:
            arguments.json.write_text(
                json.dumps({key: each.to_json() for key, each in found.items()}, indent=1)
            )
    if arguments.png:
        draw([found[name] for name in TRACES if name in found], arguments.png)
        print(f"picture: {arguments.png}")


def _say(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text} (load {os.getloadavg()[0]:.1f})", flush=True)


def show(found: Replay) -> None:
    """Print what came of a trace."""
    print(f"{found.title}: {found.layers} layers, {found.rows} rows a step")
    print("  configuration  ranks  steps   s a step   loss at its end   one device   furthest (relative)")
    for name in dict.fromkeys(step.configuration for step in found.steps):
        steps = found.of(name)
        print(
            f"  {name.upper():13}  {found.sizes[name]:5}  {steps[0].iteration:2}-{steps[-1].iteration:<3} "
            f"{median(step.seconds for step in steps):9.2f}   {steps[-1].loss:15.6f}   {steps[-1].one_device:10.6f}   "
            f"{max(step.difference for step in steps):.1e}"
        )
    for each in found.recoveries:
        parts = ", ".join(f"{name} {took:.2f}" for name, took in each.parts.items())
        print(
            f"  {each.before.upper()} -> {each.after.upper()}: {each.what} in iteration {each.iteration + 1}; "
            f"ranks {each.ranks} go on, strategy {'as' if each.as_prepared else 'NOT as'} prepared; {parts} s; "
            f"{each.moved_mb:.2f} MB moved; {each.next_step_at - each.at:.2f} s until the next step was done"
        )
    for name, feet in found.footprints.items():
        print(
            f"  {name.upper()}: {feet.processes} processes, {feet.memory / 1e9:.2f} GB, {feet.threads} threads, at most "
            f"{feet.most_files} open files in one"
        )
    print(
        f"  weights and moments at the end: {found.weights:.2f} of what may lie between them and one device's"
        f" ({found.furthest_tensor})"
    )


if __name__ == "__main__":
    main()
