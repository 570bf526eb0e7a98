"""`hetero-megatron profile`: measure the units of a recipe's model on this machine and write them as JSON."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from hetero_megatron.errors import RecipeError
from hetero_megatron.planner.measure import Experiment, Size, measure
from hetero_megatron.planner.profiles import PHASES, UNITS, Profiles
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_text import number_list
from hetero_megatron.strategy import Strategy

WIDTH = 118
LENGTHS = (0.5, 1.0)
"""Lengths of documents that are measured unless others are asked for, as shares of seq_length."""


def run(
    recipe: Recipe,
    output: Path | None,
    as_json: bool,
    tp: str = "",
    cp: str = "",
    tokens: str = "",
    lengths: str = "",
    rounds: int = 5,
    copies: int = 0,
) -> None:
    """Measure, show, and write to `output`.

    Raises:
        HeteroError: a degree does not fit the model or the machine, or the file cannot be written.
    """
    console = Console(highlight=False, stderr=as_json)
    with recipe.named():
        strategy = recipe.make_strategy()
        config, training = recipe.make_config(), recipe.training
        cluster = recipe.make_cluster()
        kind = cluster.kind(strategy.ranks[0]).name
        experiment = Experiment(
            _degrees(strategy, _numbers(tp, "--tp"), _numbers(cp, "--cp")),
            _sizes(
                strategy, training.seq_length, _numbers(tokens, "--tokens"), _numbers(lengths, "--lengths")
            ),
            rounds,
            sequence_parallel=strategy.sequence_parallel,
            context_parallel=strategy.context_parallel,
            copies=copies or _copies(strategy, kind),
        )
        _check_writable(output)
        device_type = "cpu" if kind == "cpu" else "cuda"
        with console.status("measuring") as status:
            found = measure(config, training.precision, kind, device_type, experiment, status.update)
    if output is not None:
        output.write_text(found.to_json(), encoding="utf-8")
    if as_json:
        print(json.dumps(json.loads(found.to_json())))
        return
    wide = Console(highlight=False, width=max(WIDTH, console.width))
    wide.print(_table(found))
    wide.print(_transfers(found))
    for each in found.updates:
        console.print(
            f"update of {each.elements:,} elements, and what a step takes beside: {_time(each.seconds)}"
        )
    if output is not None:
        console.print(f"profile: {output}", soft_wrap=True, markup=False)


def _copies(strategy: Strategy, kind: str) -> int:
    """On CPUs as many ranks compute at once as the run has, up to the number of cores; GPUs do not share."""
    return min(len(strategy.ranks), len(os.sched_getaffinity(0))) if kind == "cpu" else 1


def _degrees(strategy: Strategy, tps: Sequence[int], cps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """What is asked for, else what the strategy uses; one rank comes first, because others are compared with it."""
    used = {
        (size, stage.context_parallel_size)
        for pipeline in strategy.pipelines
        for stage in pipeline.stages
        for size in stage.tensor_parallel_sizes
    }
    if tps or cps:
        used = {(tp, cp) for tp in tps or (1,) for cp in cps or (1,)}
    return tuple(sorted(used | {(1, 1)}, key=lambda degree: (degree[0] * degree[1], degree)))


def _sizes(
    strategy: Strategy, seq_length: int, tokens: Sequence[int], lengths: Sequence[int]
) -> tuple[Size, ...]:
    """Micro-batches of half and all of what the strategy allows, of whole and half documents."""
    most = max(pipeline.micro_batch_size for pipeline in strategy.pipelines) * seq_length
    counts = tokens or sorted({max(1, most // 2), most})
    wanted = lengths or [max(1, int(share * seq_length)) for share in LENGTHS]
    return tuple(sorted({(count, min(length, count)) for count in counts for length in wanted}))


def _numbers(text: str, option: str) -> list[int]:
    try:
        return list(number_list(text)) if text else []
    except RecipeError as error:
        raise RecipeError(f"{option}: {error}") from error


def _check_writable(path: Path | None) -> None:
    """Before minutes of measuring, not behind them."""
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise RecipeError(f"--output: {path} cannot be written: {error.strerror}") from error


def _table(found: Profiles) -> Table:
    table = Table(
        title="ms per micro-batch: forward, backward, and weight gradients as a part of it",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("device")
    for column in ("tp", "cp", "tokens", "each"):
        table.add_column(column, justify="right", no_wrap=True)
    columns = [(unit, phase) for unit in UNITS for phase in PHASES]
    shown = [each for each in columns if any((m.unit, m.phase) == each for m in found.measurements)]
    for unit, phase in shown:
        table.add_column(f"{unit} {phase[0].upper()}", justify="right", no_wrap=True)
    rows: dict[tuple[str, int, int, int, int], dict[tuple[str, str], float]] = {}
    for m in found.measurements:
        key = (m.kind, m.tp, m.cp, m.tokens, m.seq_length)
        rows.setdefault(key, {})[m.unit, m.phase] = m.seconds
    for row, times in rows.items():
        cells = (f"{1e3 * times[each]:.3f}" if each in times else "" for each in shown)
        table.add_row(*map(str, row), *cells)
    return table


def _transfers(found: Profiles) -> Table:
    table = Table(title="communication", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("link", "operation"):
        table.add_column(column)
    for column in ("ranks", "bytes", "time", "GB/s"):
        table.add_column(column, justify="right")
    for each in found.transfers:
        rate = each.bytes / each.seconds / 1e9 if each.seconds else 0.0
        cells = (str(each.ranks), f"{each.bytes:,}", _time(each.seconds), f"{rate:.2f}")
        table.add_row(each.link, each.operation, *cells)
    return table


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"
