"""`data stats`: how long the documents of a recipe's corpora are, as tables, JSON and a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from hetero_megatron.data.documents import Source
from hetero_megatron.data.lengths import BORDERS, INTERVALS, LengthStatistics
from hetero_megatron.errors import DataError, RecipeError
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_data import corpus_settings

Found = list[tuple[str, "NDArray[np.int64]", LengthStatistics]]
_BARS = 16
_INK, _SOFT = "#1f4e79", "#d98324"


def statistics(recipe: Recipe, sources: Sequence[Source]) -> Found:
    """Name, lengths and statistics of each source, and of all together where there are several.

    Raises:
        DataError: a source is a stream, whose lengths nobody knows.
    """
    found: Found = []
    for settings, source in zip(corpus_settings(recipe.data).sources, sources, strict=True):
        lengths = getattr(source.documents, "lengths", None)
        if lengths is None:
            raise DataError(
                f"source {settings.told} is a stream, whose documents nobody has counted; drop stream"
            )
        found.append((settings.told, lengths, LengthStatistics.of(lengths)))
    if len(found) > 1:
        every = np.concatenate([lengths for _, lengths, _ in found])
        found.append(("all sources", every, LengthStatistics.of(every)))
    return found


def as_json(found: Found) -> list[dict[str, object]]:
    """A mapping per source."""
    return [
        {
            "source": name,
            "documents": each.documents,
            "tokens": each.tokens,
            "length": {"p50": each.p50, "p90": each.p90, "p99": each.p99, "max": each.longest},
            "intervals": [
                {"tokens": interval, "documents": documents, "tokens_in_documents": tokens}
                for interval, documents, tokens in zip(
                    INTERVALS, each.documents_by_interval, each.tokens_by_interval, strict=True
                )
            ],
        }
        for name, _, each in found
    ]


def print_tables(found: Found) -> None:
    """A table with a row per source, and a table of intervals per source."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", overflow="fold")
    for column in ("documents", "tokens", "p50", "p90", "p99", "longest"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, _, each in found:
        numbers = (each.documents, each.tokens, each.p50, each.p90, each.p99, each.longest)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(table)
    for name, _, each in found:
        console.print(_intervals(name, each))


def _intervals(name: str, each: LengthStatistics) -> Table:
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens each", "documents"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", width=_BARS, no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("", width=_BARS, no_wrap=True)
    rows = zip(INTERVALS, each.documents_by_interval, each.tokens_by_interval, strict=True)
    for interval, documents, tokens in rows:
        cells = []
        for share in (documents / each.documents, tokens / each.tokens):
            cells += [f"{share:.1%}" if share else "-", "█" * round(share * _BARS)]
        table.add_row(interval, *cells)
    return table


def draw(found: Found, path: Path) -> None:
    """A histogram per source over the logarithm of the length: the share of documents, and of tokens.

    Raises:
        RecipeError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, PercentFormatter
    except ImportError as error:
        raise RecipeError("--png needs the package matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 0.6 + 2.9 * len(found)), dpi=150, layout="constrained")
    longest = max(each.longest for _, _, each in found)
    top = int(np.ceil(np.log2(max(longest, 2 * BORDERS[0]))))
    edges = 2.0 ** np.arange(0, top + 0.25, 0.25)
    for place, (name, lengths, each) in enumerate(found):
        axes = figure.add_subplot(len(found), 1, place + 1)
        for weights, colour, what in (
            (np.ones(len(lengths)), _INK, "documents"),
            (lengths, _SOFT, "tokens"),
        ):
            heights, _ = np.histogram(lengths, edges, weights=weights)
            axes.stairs(heights / weights.sum(), edges, fill=True, color=colour, alpha=0.25)
            axes.stairs(heights / weights.sum(), edges, color=colour, linewidth=1.4, label=f"share of {what}")
        for value, label in ((each.p50, "p50"), (each.p90, "p90"), (each.p99, "p99")):
            axes.axvline(value, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(
                f"{label}\n{value:,}",
                (value, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3),
                textcoords="offset points",
                va="top",
                fontsize=7.5,
                color="#555555",
            )
        axes.set_xscale("log", base=2)
        axes.set_xlim(edges[0], edges[-1])
        axes.margins(y=0.25)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(
            f"{name}: {each.documents:,} documents, {each.tokens:,} tokens", loc="left", fontsize=10
        )
        if not place:
            axes.legend(frameon=False, fontsize=8.5, loc="upper left")
        if place == len(found) - 1:
            axes.set_xlabel("length of a document in tokens")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--png {path}: the picture cannot be written: {error}") from error


def _tick(value: float, _: int) -> str:
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
