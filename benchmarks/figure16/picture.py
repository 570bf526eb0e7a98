"""A picture like the paper's Figure 16: what each step took as time goes by, recoveries marked; losses beside one's."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.figure16.replay import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4C8BC9", "#D9653B", "#3F8F5F", "#7B62A3")
GREY, DARK = "#B9C0C8", "#333333"
NOTE = (
    "Real processes on two CPU cores at reduced width, as many as the paper has GPUs: what a step takes says nothing about "
    "GPUs, nor which configuration is the faster one.\nWhat the picture shows: kill -9 on the way, the paper's own "
    "strategies one after another in the surviving processes, and the loss of one device throughout."
)


def draw(replays: Sequence[Replay], path: Path) -> None:
    """Write the picture, a row per trace; the file's suffix says in which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.7 * len(replays) + 0.8), layout="constrained")
    rows = figure.subplots(len(replays), 2, width_ratios=(2.6, 1.0), squeeze=False)
    for found, (steps_at, losses_at) in zip(replays, rows, strict=True):
        colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(_names(found))}
        _steps(steps_at, found, colours)
        _losses(losses_at, found, colours)
        for axes in (steps_at, losses_at):
            axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(NOTE, fontsize=9, color=DARK, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def _names(found: Replay) -> list[str]:
    return list(dict.fromkeys(step.configuration for step in found.steps))


def _steps(axes: "Axes", found: Replay, colours: dict[str, str]) -> None:
    """A bar per step, as wide as it took; recoveries hatched, from the kill to the first step after it."""
    tallest = max(step.seconds for step in found.steps)
    for step in found.steps:
        axes.bar(
            step.at - step.seconds,
            step.seconds,
            step.seconds,
            align="edge",
            color=colours[step.configuration],
            edgecolor="white",
            linewidth=0.8,
        )
    for each in found.recoveries:
        first = next(step for step in found.steps if step.iteration == each.iteration + 1)
        begins = first.at - first.seconds
        # A node that starts is taken in when it has come up, between two steps.
        since = each.at if each.what.startswith("kill") else _end_of(found, each.iteration)
        axes.axvspan(since, begins, color=GREY, alpha=0.5, hatch="////", linewidth=0)
        axes.axvline(each.at, color=DARK, linewidth=1.2)
        axes.text(each.at, 1.30 * tallest, f" {each.what}", fontsize=9, color=DARK, va="top")
        axes.text(
            each.at,
            1.23 * tallest,
            f" {begins - since:.1f} s to go on\n {each.moved_mb:.1f} MB moved",
            fontsize=8,
            color=DARK,
            va="top",
        )
    for name, colour in colours.items():
        steps = found.of(name)
        middle = (steps[0].at - steps[0].seconds + steps[-1].at) / 2
        text = f"{name.upper()}: {found.sizes[name]} ranks\n{median(step.seconds for step in steps):.2f} s a step"
        axes.text(
            middle, -0.02 * tallest, text, ha="center", va="top", fontsize=9, color=colour, weight="bold"
        )
    axes.set_ylim(0, 1.32 * tallest)
    axes.set_xlim(0, found.steps[-1].at * 1.01)
    axes.set_ylabel("seconds of a step")
    axes.set_xlabel("seconds since the first step began", labelpad=22)
    axes.tick_params(axis="x", pad=24)
    axes.set_title(found.title, loc="left", fontsize=11, weight="bold")


def _end_of(found: Replay, iteration: int) -> float:
    """When a step was done."""
    return next(step.at for step in found.steps if step.iteration == iteration)


def _losses(axes: "Axes", found: Replay, colours: dict[str, str]) -> None:
    iterations = [step.iteration for step in found.steps]
    axes.plot(
        iterations, [step.one_device for step in found.steps], color=DARK, linewidth=1, label="one device"
    )
    for name, colour in colours.items():
        steps = found.of(name)
        axes.plot(
            [step.iteration for step in steps],
            [step.loss for step in steps],
            "o",
            color=colour,
            markersize=5,
            label=name.upper(),
        )
    axes.set_title(f"loss: at most {found.furthest:.0e} apart (relative)", loc="left", fontsize=10)
    axes.set_xlabel("iteration")
    axes.legend(frameon=False, fontsize=8)
