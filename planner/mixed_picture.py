"""Mixed lengths as a picture: how long documents are, what each step takes and by which strategy (paper Figure 18)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.chooser import Choice, NamedStrategy
from hetero_megatron.planner.length_sample import LengthSample, borders

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#D9653B", "#4C8BC9", "#3F8F5F", "#7B62A3", "#C9A227", "#8C8C8C")
GREY, DARK = "#B9C0C8", "#333333"


def draw_mixed(
    sample: LengthSample,
    named: Sequence[NamedStrategy],
    choices: Sequence[Choice],
    lines: Sequence[tuple[str, float]],
    path: Path,
    titles: Sequence[str] = (),
) -> None:
    """Write the picture; the file's suffix says in which format.

    `choices`: of the sample's steps. `lines`: (name, seconds) drawn across the step times, such as a baseline's.
    `titles`: what each strategy consists of.

    Raises:
        PlannerError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise PlannerError(
            "a picture needs matplotlib, which is not installed; pip install hetero-megatron[plots]"
        ) from error
    figure = Figure(figsize=(13, 10), layout="constrained")
    lengths_at, longest_at, seconds_at = figure.subplots(3, 1, height_ratios=(1.0, 1.1, 1.3))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(named))]
    _lengths(lengths_at, sample)
    places = np.arange(1, len(choices) + 1)
    own = [colours[choice.strategy] for choice in choices]
    _longest(longest_at, sample, places, own, named, colours)
    _seconds(seconds_at, choices, places, own, lines)
    told = [f": {title}" for title in titles] or [""] * len(named)
    patches = [
        Patch(color=colour, label=f"{each.name}{title}")
        for each, colour, title in zip(named, colours, told, strict=True)
    ]
    longest_at.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=9
    )
    for axes in (lengths_at, longest_at, seconds_at):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlannerError(f"{path} cannot be written: {error}") from error


def _lengths(axes: "Axes", sample: LengthSample) -> None:
    """Share of documents and of tokens by length."""
    lengths = np.concatenate(sample.steps)
    ends = borders(sample.context)[::2]
    ends = ends if ends[-1] == sample.context else (*ends, sample.context)
    bins = np.searchsorted(ends, lengths, side="left")
    documents = 100 * np.bincount(bins, minlength=len(ends)) / len(lengths)
    tokens = 100 * np.bincount(bins, lengths, len(ends)) / lengths.sum()
    places = np.arange(len(ends))
    for shift, shares, colour, name in ((-0.2, documents, GREY, "documents"), (0.2, tokens, DARK, "tokens")):
        axes.bar(places + shift, shares, 0.38, color=colour, label=f"share of {name}")
        for place, share in zip(places, shares, strict=True):
            axes.text(
                place + shift,
                share,
                f"{share:.0f}" if share >= 1 else f"{share:.1f}",
                ha="center",
                va="bottom",
                fontsize=8,
            )
    starts = ["up to", *(f"{short(end)} to" for end in ends[:-1])]
    axes.set_xticks(places, [f"{start} {short(end)}" for start, end in zip(starts, ends, strict=True)])
    axes.tick_params(axis="x", length=0, labelsize=9)
    axes.set_ylabel("%")
    axes.set_title(
        f"documents of {len(sample.steps)} steps of {sample.tokens_per_step:,} tokens, cut to {short(sample.context)}",
        loc="left",
        fontsize=11,
    )
    axes.legend(frameon=False, fontsize=9)


def _longest(
    axes: "Axes",
    sample: LengthSample,
    places: np.ndarray,
    own: Sequence[str],
    named: Sequence[NamedStrategy],
    colours: Sequence[str],
) -> None:
    """The longest document of each step, in the colour of the strategy that takes it, and what each strategy holds."""
    for place, step in zip(places, sample.steps, strict=True):
        axes.plot(
            np.full(len(step), place), step, linestyle="", marker=".", markersize=3, color=GREY, zorder=1
        )
    axes.scatter(places, sample.longest, c=list(own), s=34, zorder=3)
    for each, colour in zip(named, colours, strict=True):
        if each.max_length is not None:
            axes.axhline(each.max_length, color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
            axes.text(
                places[-1] + 0.6,
                each.max_length,
                f"{each.name} holds {short(each.max_length)}",
                va="center",
                fontsize=8.5,
                color=colour,
            )
    axes.set_yscale("log", base=2)
    ticks = [32, 128, *borders(sample.context)[::2]]
    axes.set_yticks(ticks, [short(each) for each in ticks])
    axes.set_xlim(0.3, places[-1] + 0.5)
    axes.set_ylabel("tokens of a document")


def _seconds(
    axes: "Axes",
    choices: Sequence[Choice],
    places: np.ndarray,
    own: Sequence[str],
    lines: Sequence[tuple[str, float]],
) -> None:
    """Step times, switches on top."""
    seconds = np.array([choice.candidate.seconds for choice in choices])
    switches = np.array([choice.switch_seconds for choice in choices])
    axes.bar(places, seconds, 0.8, color=list(own))
    axes.bar(places, switches, 0.8, bottom=seconds, color=DARK)
    top = max([float((seconds + switches).max()), *(value for _, value in lines)])
    written = -np.inf
    for name, value in sorted(
        [*lines, ("mean", float((seconds + switches).mean()))], key=lambda each: each[1]
    ):
        axes.axhline(value, color=DARK, linewidth=1, linestyle=(0, (4, 3)) if name != "mean" else "solid")
        # Names of lines close together stand one above the other.
        written = max(value, written + 0.04 * top)
        axes.text(places[-1] + 0.6, written, f"{name} {value:.3g} s", va="center", fontsize=8.5)
    axes.set_ylim(0, top * 1.06)
    axes.set_xlim(0.3, places[-1] + 0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("predicted seconds; switches in black")


def short(tokens: int) -> str:
    """`16K` for 16384, `768` for 768, `18.5K` between."""
    if tokens < 1024:
        return str(tokens)
    value = tokens / 1024
    return f"{value:.0f}K" if value == int(value) else f"{value:.1f}K"
