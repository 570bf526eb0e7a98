"""Why one plan is slower than another, in words, from the numbers of both."""

from hetero_megatron.planner.realize import Priced

LEAST = 1e-3
"""Differences below this share of a step are not worth a word."""


def bubble(priced: Priced) -> float:
    """Share of the pipelines' time in which a stage, on average, computes nothing; stages count by their ranks."""
    busy = whole = 0.0
    estimate = priced.estimate
    for pipeline, seconds in zip(priced.strategy.pipelines, estimate.busy, strict=True):
        for stage, own in zip(pipeline.stages, seconds, strict=True):
            busy += len(stage.ranks) * own
            whole += len(stage.ranks) * max(estimate.pipeline_seconds)
    # Where nobody waits, rounding must not leave a bubble of less than nothing.
    return max(0.0, 1 - busy / whole) if whole else 0.0


def work(priced: Priced) -> float:
    """Seconds of computing, over all ranks."""
    return sum(
        len(stage.ranks) * own
        for pipeline, seconds in zip(priced.strategy.pipelines, priced.estimate.busy, strict=True)
        for stage, own in zip(pipeline.stages, seconds, strict=True)
    )


def why_slower(other: Priced, best: Priced) -> str:
    """A sentence on where the other plan loses its time.

    >>> why_slower(runner_up, best)  # doctest: +SKIP
    '2.7% longer: pipelines +0.102 s (bubble 14% instead of 11%), after them +0.050 s (gradients, update)'
    """
    parts = []
    pipelines = max(other.estimate.pipeline_seconds) - max(best.estimate.pipeline_seconds)
    tail = other.estimate.tail_seconds - best.estimate.tail_seconds
    if abs(pipelines) > LEAST * best.seconds:
        notes = [f"bubble {100 * bubble(other):.0f}% instead of {100 * bubble(best):.0f}%"]
        if (more := work(other) / work(best) - 1) > 0.01:
            notes.append(f"{100 * more:.0f}% more device time for the same work")
        if len(other.strategy.idle_ranks) > len(best.strategy.idle_ranks):
            notes.append(
                f"{len(other.strategy.idle_ranks)} devices idle instead of {len(best.strategy.idle_ranks)}"
            )
        parts.append(f"pipelines {pipelines:+.3f} s ({', '.join(notes)})")
    if abs(tail) > LEAST * best.seconds:
        parts.append(f"after them {tail:+.3f} s (gradients, update)")
    told = ", ".join(parts) or "no part of it stands out"
    return f"{100 * (other.seconds / best.seconds - 1):.1f}% longer: {told}"
