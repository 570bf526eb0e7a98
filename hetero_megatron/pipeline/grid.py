"""A pipeline's step as text: one row per stage, one column per tick (paper Figure 21, right)."""

from collections.abc import Sequence

from hetero_megatron.pipeline.action import Action, ComputeKind
from hetero_megatron.pipeline.lower import PipelineActions
from hetero_megatron.pipeline.schedule import shape
from hetero_megatron.pipeline.timing import clock

Cell = tuple[int, int, Action]
"""(first tick, number of ticks, what runs)."""


def grid(pipelines: Sequence[PipelineActions], backward_ticks: int = 2) -> str:
    """The time grid of all pipelines: `.` is idle, `=` goes on, a backward takes `backward_ticks` ticks.

    >>> from hetero_megatron.pipeline.lower import lower
    >>> from hetero_megatron.pipeline.schedule import one_f_one_b
    >>> print(grid([lower(one_f_one_b(2, 2))], backward_ticks=1))
    pipeline 0: 2 stages, 2 micro-batches, bubble 33%
    stage 0 | F0 F1 .  B0 .  B1
    stage 1 | .  F0 B0 F1 B1 .
    """

    def ticks(_pipeline: int, _stage: int, kind: ComputeKind) -> float:
        return 1.0 if kind == "F" else float(backward_ticks)

    blocks: list[str] = []
    for number, (pipeline, timing) in enumerate(
        zip(pipelines, clock(pipelines, ticks).pipelines, strict=True)
    ):
        rows = [
            [(round(span.start), round(span.end - span.start), span.action) for span in spans]
            for spans in timing.stages
        ]
        chunks = shape(pipeline.compute)[1]
        head = f"pipeline {number}: {_count(len(rows), 'stage')}" + f" of {chunks} chunks" * (chunks > 1)
        head += f", {_count(pipeline.micro_batches, 'micro-batch')}"
        bubble = f", bubble {timing.bubble_share:.0%}" if pipeline.micro_batches else ""
        blocks.append(head + bubble + "\n" + render(rows))
    return "\n".join(blocks)


def render(rows: Sequence[Sequence[Cell]], remarks: Sequence[str] = ()) -> str:
    """Rows of cells aligned in time, each followed by its remark, if there is one."""
    end = max((start + ticks for row in rows for start, ticks, _ in row), default=0)
    width = max((len(str(action)) for row in rows for _, _, action in row), default=1)
    lines: list[str] = []
    for stage, row in enumerate(rows):
        words = ["."] * end
        for start, ticks, action in row:
            words[start : start + ticks] = [str(action)] + ["=" * len(str(action))] * (ticks - 1)
        line = f"stage {stage:>{len(str(len(rows) - 1))}} | " + " ".join(word.ljust(width) for word in words)
        remark = remarks[stage] if stage < len(remarks) else ""
        lines.append(f"{line} {remark}".rstrip())
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
