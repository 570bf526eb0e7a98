"""A plan as a picture: a row per pipeline, a box per stage as wide as its time, coloured by kind of device (Table 9)."""

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.cluster import Cluster, ranges_text
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.realize import Priced
from hetero_megatron.strategy import Pipeline, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# H800 yellow, as in the paper's Table 9.
COLOURS = ("#F2C84B", "#7FB3D9", "#8CC48A", "#D99AC5", "#B9A6E0", "#E59A80")
MOST_ROWS = 24
"""Pipelines that are drawn; of equal ones, one with their number."""
NARROW = 0.055


def draw_plan(best: Priced, cluster: Cluster, costs: Costs, path: Path) -> None:
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
    strategy = best.strategy
    colours = {kind.name: COLOURS[n % len(COLOURS)] for n, kind in enumerate(cluster.kinds)}
    rows = _rows(strategy.pipelines, cluster)[:MOST_ROWS]
    figure = Figure(figsize=(14, 1.9 + 0.95 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    longest = max(sum(_seconds(p, s, costs) for s in range(len(p.stages))) for p, _ in rows)
    for row, (pipeline, numbers) in enumerate(rows):
        left = 0.0
        for place, stage in enumerate(pipeline.stages):
            width = _seconds(pipeline, place, costs)
            _box(axes, stage, row, left, width, longest, colours[cluster.kind(stage.ranks[0]).name])
            left += width
        who = f"pipeline {numbers[0]}" if len(numbers) == 1 else f"pipelines {ranges_text(numbers)}"
        axes.text(
            -0.01 * longest,
            row,
            f"{who}\n{pipeline.micro_batches} × bs{pipeline.micro_batch_size}",
            ha="right",
            va="center",
            fontsize=10,
        )
    axes.set_xlim(0, longest * 1.002)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks([])
    axes.set_xlabel("seconds of one micro-batch, forward and backward; the widest box sets the pace")
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = dict.fromkeys(cluster.kind(rank).name for rank in strategy.ranks)
    handles = [Patch(facecolor=colours[name], edgecolor="#333333", label=name) for name in used]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False
    )
    idle = f", idle: {ranges_text(strategy.idle_ranks)}" if strategy.idle_ranks else ""
    axes.set_title(
        f"step {best.seconds:.4g} s, ZeRO {strategy.zero}, {strategy.schedule}{idle}", loc="left", fontsize=12
    )
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise PlannerError(f"--png: {path} cannot be written: {error}") from error


def _rows(pipelines: tuple[Pipeline, ...], cluster: Cluster) -> list[tuple[Pipeline, list[int]]]:
    """Pipelines, equal ones together."""
    found: dict[object, tuple[Pipeline, list[int]]] = {}
    for number, pipeline in enumerate(pipelines):
        shape = tuple(
            (cluster.kind(s.ranks[0]).name, s.tensor_parallel_sizes, s.layers, s.recompute)
            for s in pipeline.stages
        )
        key = (pipeline.micro_batches, pipeline.micro_batch_size, shape) if len(pipelines) > 8 else number
        found.setdefault(key, (pipeline, []))[1].append(number)
    return list(found.values())


def _seconds(pipeline: Pipeline, place: int, costs: Costs) -> float:
    lengths = (costs.seq_length,) * pipeline.micro_batch_size
    ends = (place == 0, place == len(pipeline.stages) - 1)
    return costs.stage(pipeline.stages[place], lengths, *ends).total


def _box(
    axes: "Axes", stage: Stage, row: int, left: float, width: float, longest: float, colour: str
) -> None:
    axes.barh(row, width, left=left, height=0.78, color=colour, edgecolor="#333333", linewidth=0.8)
    first, last = stage.chunks[0][0], stage.chunks[-1][-1]
    sizes = stage.tensor_parallel_sizes
    degree = f"TP{sizes[0]}" + (f" CP{len(sizes)}" if len(sizes) > 1 else "")
    again = f" {stage.recompute[0].kind}" if stage.recompute else ""
    text = f"R{ranges_text(stage.ranks)}\nL{first}-{last}\n{degree}{again}"
    narrow = width < NARROW * longest
    axes.text(
        left + width / 2,
        row,
        text,
        ha="center",
        va="center",
        fontsize=6.5 if narrow else 9,
        rotation=90 if width < NARROW * longest / 2 else 0,
        clip_on=True,
    )
