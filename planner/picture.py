"""A simulated step as a timeline picture: a row per stage, pipelines one under the other (paper Figure 12's form)."""

from collections.abc import Mapping
from pathlib import Path

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.events import Place, StageSpan
from hetero_megatron.planner.simulate import Simulation

COLOURS: Mapping[str, str] = {
    "forward": "#4C8BC9",
    "backward": "#E8A33D",
    "receive": "#8C8C8C",
    "reduce": "#B04A5A",
    "gather": "#7B62A3",
    "agree": "#444444",
    "update": "#3F8F5F",
}
NAMES: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "receive": "message on its way",
    "reduce": "gradients reduced",
    "gather": "parameters gathered",
    "agree": "norm agreed",
    "update": "update",
}
LEAST_LABELLED = 0.014
"""A span narrower than this share of the picture has no number on it."""


def draw_timeline(simulation: Simulation, path: Path, title: str) -> None:
    """Write the picture; the file's suffix says in which format.

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
    places = sorted(simulation.places)
    pipelines = len({pipeline for pipeline, _ in places})
    rows = {place: number + 0.6 * place[0] for number, place in enumerate(places)}
    height = 1.5 + 0.42 * (len(places) + 0.6 * pipelines)
    figure = Figure(figsize=(16, max(3.2, height)), layout="constrained")
    axes = figure.add_subplot()
    for span in simulation.spans:
        _draw(axes, span, rows[span.place], simulation.seconds)
    axes.axvline(simulation.bound, color="#222222", linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    axes.axvline(simulation.seconds, color="#222222", linewidth=1.2, zorder=2)
    axes.set_xlim(0, simulation.seconds * 1.005)
    axes.set_ylim(max(rows.values()) + 0.75, -0.75)
    axes.set_yticks([rows[place] for place in places], [_label(simulation, place) for place in places])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(
        f"{title}: {_seconds(simulation.seconds)} a step, {_seconds(simulation.bound)} without any bubble "
        f"(dashed), {100 * simulation.gap:.1f}% above it",
        loc="left",
        fontsize=11,
    )
    shown = {_category(span) for span in simulation.spans}
    handles = [Patch(color=colour, label=NAMES[name]) for name, colour in COLOURS.items() if name in shown]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise PlannerError(f"{path} cannot be written: {error}") from error


def _draw(axes: object, span: StageSpan, row: float, whole: float) -> None:
    category, width = _category(span), span.end - span.start
    if width <= 0:
        return
    behind = category in ("reduce", "gather", "receive")
    # What goes on behind computing is a thin strip below it.
    low, tall = (row + 0.28, 0.16) if behind else (row - 0.38, 0.64)
    axes.broken_barh(  # type: ignore[attr-defined]  # matplotlib is an optional library
        [(span.start, width)],
        (low, tall),
        facecolors=COLOURS[category],
        edgecolor="white",
        linewidth=0.4,
        zorder=3,
    )
    if span.what == "compute" and width >= LEAST_LABELLED * whole:
        axes.text(  # type: ignore[attr-defined]
            span.start + width / 2,
            row - 0.06,
            span.name[1:],
            ha="center",
            va="center",
            fontsize=7,
            color="white",
            zorder=4,
            clip_on=True,
        )


def _category(span: StageSpan) -> str:
    if span.what == "compute":
        return "forward" if span.name.startswith("F") else "backward"
    return span.what


def _label(simulation: Simulation, place: Place) -> str:
    own = [each for each in simulation.ranks if (each.pipeline, each.stage) == place]
    kinds = "+".join(dict.fromkeys(each.kind for each in own))
    return f"R{ranges_text(simulation.places[place])}  {kinds} x{len(own)}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
