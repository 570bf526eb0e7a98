"""A run as a picture: how long its documents are, which strategy took each step, and for how long (paper Figure 18)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_megatron.errors import RecipeError
from hetero_megatron.planner.mixed_picture import COLOURS, DARK, GREY, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PER_STEP, NARROWEST, WIDEST = 0.14, 9.0, 15.0
SEEN = 0.05
"""The least share of a step's tokens that is worth showing."""


@dataclass(frozen=True, slots=True)
class ShownStrategy:
    """A strategy in the picture: its name, what it consists of, and the longest document it takes (None: any)."""

    name: str
    text: str
    max_length: int | None = None


def draw_run(
    steps: Sequence[Mapping[str, Any]], strategies: Sequence[ShownStrategy], path: Path, title: str
) -> None:
    """Write the picture; the file's suffix says in which format.

    `steps`: lines of metrics.jsonl. Without lengths of documents only the step times are drawn.

    Raises:
        RecipeError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RecipeError(
            "a picture needs matplotlib, which is not installed; pip install hetero-megatron[plots]"
        ) from error
    with_lengths = all("lengths" in step for step in steps)
    ratios = (1.0, 1.4, 1.3) if with_lengths else (1.0,)
    width = min(WIDEST, max(NARROWEST, WIDTH_PER_STEP * len(steps) + 3.5))
    figure = Figure(figsize=(width, 2.9 * len(ratios) + 0.4), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(len(ratios), 1, height_ratios=ratios)))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(strategies))]
    own = [colours[step.get("strategy_number", 0)] for step in steps]
    if with_lengths:
        _lengths(panels[0], steps)
        _documents(panels[1], steps, own, strategies, colours)
    _seconds(panels[-1], steps, own)
    taken = Counter(step.get("strategy_number", 0) for step in steps)
    patches = [
        Patch(
            color=colour,
            label=f"{each.name}: {each.text}, {taken[number]} steps" if each.name else each.text,
        )
        for number, (each, colour) in enumerate(zip(strategies, colours, strict=True))
    ]
    panels[-2 if with_lengths else -1].legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RecipeError(f"-o: {path} cannot be written: {error}") from error


def _lengths(axes: "Axes", steps: Sequence[Mapping[str, Any]]) -> None:
    """Share of documents and of tokens by length."""
    counts: dict[int, np.ndarray] = {}
    for step in steps:
        for end, entry in step["lengths"].items():
            counts[int(end)] = counts.get(int(end), np.zeros(2)) + np.array(entry)
    ends = [2**power for power in range(min(counts).bit_length() - 1, max(counts).bit_length())]
    both = np.array([counts.get(end, np.zeros(2)) for end in ends])
    shares = 100 * both / both.sum(axis=0)
    places = np.arange(len(ends))
    for shift, column, colour, name in ((-0.2, 0, GREY, "documents"), (0.2, 1, DARK, "tokens")):
        axes.bar(places + shift, shares[:, column], 0.38, color=colour, label=f"share of {name}")
        for place, share in zip(places, shares[:, column], strict=True):
            text = f"{share:.0f}" if share >= 1 else f"{share:.1f}"
            axes.text(place + shift, share, text, ha="center", va="bottom", fontsize=8)
    starts = ["up to", *(f"{short(end)} to" for end in ends[:-1])]
    axes.set_xticks(places, [f"{start}\n{short(end)}" for start, end in zip(starts, ends, strict=True)])
    axes.tick_params(axis="x", length=0, labelsize=9)
    axes.set_ylabel("%")
    axes.set_xlabel("tokens of a document")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _documents(
    axes: "Axes",
    steps: Sequence[Mapping[str, Any]],
    own: Sequence[str],
    strategies: Sequence[ShownStrategy],
    colours: Sequence[str],
) -> None:
    """The longest document of each step in the colour of its strategy, over where the step's tokens are."""
    places = [step["iteration"] for step in steps]
    for place, step in zip(places, steps, strict=True):
        for end, share in _token_shares(step):
            axes.bar(
                place, end / 2, 1.0, bottom=end / 2, color=DARK, alpha=0.45 * share, linewidth=0, zorder=1
            )
    longest = [step["longest_document"] for step in steps]
    axes.scatter(places, longest, c=list(own), s=38, edgecolors="white", linewidths=0.6, zorder=3)
    for each, colour in zip(strategies, colours, strict=True):
        if each.max_length is not None:
            axes.axhline(each.max_length, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
            axes.annotate(
                f"{each.name} takes\nup to {short(each.max_length)}",
                (1.0, each.max_length),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=colour,
            )
    axes.set_yscale("log", base=2)
    top = 2 ** int(np.ceil(np.log2(max(longest))))
    lowest = min(end for step in steps for end, share in _token_shares(step) if share >= SEEN) // 2
    ticks = [tick for tick in (2**power for power in range(2, 31)) if lowest <= tick <= top]
    axes.set_yticks(ticks, [short(tick) for tick in ticks])
    axes.set_ylim(max(1, lowest), top * 1.25)
    axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
    axes.set_ylabel("longest document;\ngrey: where the tokens are")


def _token_shares(step: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The share of a step's tokens in documents of each length, by the length's end."""
    whole = sum(tokens for _, tokens in step["lengths"].values())
    return [(int(end), tokens / whole) for end, (_, tokens) in step["lengths"].items()]


def _seconds(axes: "Axes", steps: Sequence[Mapping[str, Any]], own: Sequence[str]) -> None:
    """Step times, switches on top, and the mean of both."""
    places = [step["iteration"] for step in steps]
    seconds = np.array([step["step_seconds"] for step in steps])
    switches = np.array([step.get("switch_seconds", 0.0) for step in steps])
    axes.bar(places, seconds, 0.82, color=list(own))
    axes.bar(places, switches, 0.82, bottom=seconds, color=DARK)
    mean = float((seconds + switches).mean())
    axes.axhline(mean, color=DARK, linewidth=1)
    axes.annotate(
        f"mean {mean:.3g} s",
        (1.0, mean),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
    )
    axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
    axes.set_xlabel("step")
    changes = int((switches > 0).sum())
    told = f"\n{changes} switches in black, {switches.sum():.2g} s" if changes else ""
    axes.set_ylabel(f"seconds of a step{told}")
