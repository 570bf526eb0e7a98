"""`hetero-megatron simulate`: a step of a recipe's strategy, predicted, as a table, JSON, a trace or a picture."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetero_megatron.cluster import ranges_text
from hetero_megatron.data.dispatch import deal
from hetero_megatron.errors import PlannerError, RecipeError
from hetero_megatron.models.llama import Llama
from hetero_megatron.planner.beside import PARTS, Measured, MeasuredStep, measured_step
from hetero_megatron.planner.cost import Costs, Lengths
from hetero_megatron.planner.picture import draw_timeline
from hetero_megatron.planner.simulate import RankReport, Simulation, simulate
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_plan import costs_under
from hetero_megatron.run import build_program
from hetero_megatron.strategy import Strategy
from hetero_megatron.trace_file import chrome_trace, read_spans

WIDTH = 100
GIB = 2**30


def run(
    recipe: Recipe,
    as_json: bool,
    trace: Path | None = None,
    png: Path | None = None,
    profile: Path | None = None,
    beside: Path | None = None,
) -> None:
    """Print what a step is predicted to take; write a trace and a picture where asked for.

    Raises:
        HeteroError: the recipe cannot be turned into a Program, or a file cannot be read or written.
    """
    with recipe.named():
        profiles = profiles_of(recipe, profile)
        program = build_program(recipe, Llama(recipe.make_config()))
        costs = costs_under(recipe, program.strategy, program.cluster, profiles)
        found = simulate(program, costs, lengths_of(recipe, program.strategy))
        measured = None if beside is None else read_measured(beside, program)
    if trace is not None:
        text = chrome_trace(found.trace_spans(), found.trace_names(), found.trace_counters())
        _write(text, trace, "--trace")
    if png is not None:
        draw_timeline(found, png, Path(recipe.output.folder).name)
    if as_json:
        print(json.dumps(found.as_json() | ({} if measured is None else {"measured": asdict(measured)})))
    else:
        _print(found, costs)
        if measured is not None:
            _compare(found, measured)


def read_measured(path: Path, program: Program) -> MeasuredStep:
    """The steps of a trace that `pretrain --trace` has written.

    Raises:
        RecipeError: the file cannot be read.
        PlannerError: it is no trace, or one of another strategy.
    """
    try:
        return measured_step(read_spans(path.read_text(encoding="utf-8")), program)
    except OSError as error:
        raise RecipeError(f"--beside: {path}: {error.strerror}") from error
    except PlannerError as error:
        raise PlannerError(f"--beside: {path}: {error}") from error
    except ValueError as error:
        raise PlannerError(f"--beside: {path} is no trace that `pretrain --trace` has written") from error


def _compare(found: Simulation, measured: MeasuredStep) -> None:
    """Prediction and measurement, rank by rank, and where they are furthest apart."""
    console = Console(highlight=False)
    console.print(
        f"measured step: [bold]{_seconds(measured.seconds)}[/bold], the mean of {measured.steps}; the predicted one is "
        f"{100 * (found.seconds / measured.seconds - 1):+.1f}%",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right")
    for part in PARTS:
        for side in ("predicted", "measured"):
            table.add_column(f"{part}\n{side}", justify="right", no_wrap=True)
    table.add_column("predicted, measured", no_wrap=True)
    worst = (0.0, "", 0, 0.0, 0.0)
    for report in found.ranks:
        real = measured.ranks[report.rank]
        cells = []
        for part in PARTS:
            told, was = getattr(report, part), getattr(real, part)
            shares = told / found.seconds, was / measured.seconds
            worst = max(worst, (abs(shares[0] - shares[1]), part, report.rank, *shares))
            cells += [_seconds(told), _seconds(was)]
        bars = Text.assemble(_bar(report, found.seconds), "\n", _bar(real, measured.seconds))
        table.add_row(str(report.rank), *cells, bars)
    Console(highlight=False, width=max(WIDTH, console.width)).print(table)
    _, part, rank, told, was = worst
    console.print(
        f"furthest apart: {part} of rank {rank}, {100 * told:.1f}% of the step predicted and {100 * was:.1f}% measured",
        soft_wrap=True,
    )


def lengths_of(recipe: Recipe, strategy: Strategy) -> tuple[tuple[Lengths, ...], ...] | None:
    """The micro-batches of a step as the trainer deals them: rows of seq_length, each taken as one document.

    Where documents are packed, their lengths are not known here: None, for micro-batches as large as may be.
    """
    if recipe.data.packing == "documents":
        return None
    sizes = [(pipeline.micro_batches, pipeline.micro_batch_size) for pipeline in strategy.pipelines]
    dealt = deal(recipe.training.global_batch_size, sizes)
    return tuple(tuple((recipe.training.seq_length,) * len(rows) for rows in own) for own in dealt)


def _print(found: Simulation, costs: Costs) -> None:
    console = Console(highlight=False)
    console.print(
        f"predicted step: [bold]{_seconds(found.seconds)}[/bold]; without any bubble or exposed communication "
        f"{_seconds(found.bound)}, so {100 * found.gap:.1f}% above the bound",
        soft_wrap=True,
    )
    wide = Console(highlight=False, width=max(WIDTH, console.width))
    wide.print(_table(found, costs))
    for text in costs.warnings:
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)
    if not costs.profiles.measurements:
        console.print(
            "times follow from published figures and the shares that training sustains (planner/rates.py); "
            "`hetero-megatron profile` measures, and --profile reads what it wrote",
            soft_wrap=True,
        )


def _table(found: Simulation, costs: Costs) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("pipeline")
    table.add_column("stage", justify="right")
    table.add_column("ranks", overflow="fold", min_width=6)
    table.add_column("device")
    for column in ("busy", "comm", "bubble"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("memory peak", justify="right", no_wrap=True)
    for (pipeline, stage), own in groupby(
        sorted(found.ranks, key=lambda each: (each.pipeline, each.stage)),
        lambda each: (each.pipeline, each.stage),
    ):
        for (kind, _), alike in groupby(list(own), lambda each: (each.kind, each.memory_peak)):
            same = list(alike)
            capacity = costs.cluster.kind(same[0].rank).memory_bytes
            fits = same[0].memory_peak <= capacity
            table.add_row(
                str(pipeline),
                str(stage),
                ranges_text(each.rank for each in same),
                kind,
                *(
                    f"{100 * part / found.seconds:.1f}%"
                    for part in (same[0].busy, same[0].comm, same[0].bubble)
                ),
                _bar(same[0], found.seconds),
                f"{same[0].memory_peak / GIB:.2f} of {capacity / GIB:.1f} GiB" + ("" if fits else " !"),
                style="" if fits else "red",
            )
    return table


BAR = 24


def _bar(report: RankReport | Measured, whole: float) -> Text:
    """Busy, communication and bubble as a coloured bar."""
    busy = round(BAR * report.busy / whole)
    comm = min(BAR - busy, round(BAR * report.comm / whole))
    return Text.assemble(("█" * busy, "green"), ("▓" * comm, "magenta"), ("░" * (BAR - busy - comm), "dim"))


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def _write(text: str, path: Path, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{option}: {path} cannot be written: {error.strerror}") from error
