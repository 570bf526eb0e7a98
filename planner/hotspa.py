"""How HotSPa would train on mixed lengths: intervals of lengths in turn, each under its own strategy (paper §9 c, Table 14).

After HotSPa (SOSP 2024). Its limits, kept here:

- A step goes through intervals of lengths one after the other, and switches between their strategies in between, and
  back for the next step; gradients of all intervals add up, and weights are updated once.
- The strategy of an interval is homogeneous: DP, TP and PP, no context parallelism, ZeRO-1, all devices.
- Documents are packed into windows as long as the interval's end, one window a micro-batch.

In its favour: attention stays inside documents; windows go to pipelines by cost; `plan_buckets` looks at every choice of
intervals with ends at the context over powers of two, and for each interval at every homogeneous strategy.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.layouts import Layout, Layouts
from hetero_megatron.planner.length_sample import Lengths
from hetero_megatron.planner.mixed_baselines import Window, dealt, fitting, windows
from hetero_megatron.strategy import Strategy

Bucket = tuple[int, Layout, int]
"""End of the interval, layout of a pipeline, pipelines."""

HOTSPA: dict[int, tuple[Bucket, ...]] = {
    32768: ((4096, Layout(4, 1, 2), 4), (16384, Layout(8, 1, 2), 2), (32768, Layout(16, 1, 1), 2)),
    16384: ((4096, Layout(4, 1, 2), 4), (16384, Layout(8, 1, 2), 2)),
}
"""Paper Table 14 by context, on 32 devices."""
HALVINGS, LEAST_END = 4, 512
FULLY_TIMED = 2
"""Strategies of an interval that are timed on all steps, after the first one."""


class Buckets:
    """Length intervals one after the other in a step, each with a homogeneous strategy."""

    def __init__(
        self, layouts: Layouts, buckets: Sequence[Bucket], switch_seconds: float | None = None
    ) -> None:
        """Interval ends ascending; a window is as large as its interval's end.

        Raises:
            PlannerError: a strategy does not hold its interval's longest document.
        """
        self.buckets = tuple(buckets)
        self.layouts, self.costs = layouts, layouts.costs
        self.ends = [end for end, _, _ in buckets]
        self.strategies = [fitting(layouts, [(layout, count, end)]) for end, layout, count in buckets]
        named = [NamedStrategy(str(end), each) for end, each in zip(self.ends, self.strategies, strict=True)]
        self.switches = StepChooser(named, self.costs, switch_seconds).switches

    def __str__(self) -> str:
        """Such as `4096: DP4 TP4 PP2, 16384: DP2 TP8 PP2`."""
        return ", ".join(f"{end}: DP{count} {layout}" for end, layout, count in self.buckets)

    def seconds(self, lengths: Sequence[int]) -> tuple[float, float]:
        """A step's seconds of computing and of switching: from interval to interval, and back for the next step."""
        low, used, computing, tail = 0, [], 0.0, 0.0
        for number, end in enumerate(self.ends):
            own = [length for length in lengths if low < length <= end]
            low = end
            if own:
                took, after = _interval(self.layouts, self.strategies[number], windows(own, end))
                computing += took
                tail = max(tail, after)
                used.append(number)
        around = zip(used, [*used[1:], used[0]], strict=True) if len(used) > 1 else ()
        return computing + tail, sum(self.switches[a][b] for a, b in around)

    def mean(self, steps: Sequence[Lengths]) -> float:
        """The mean step, switches included."""
        return float(np.mean([sum(self.seconds(step.tolist())) for step in steps]))


def _interval(layouts: Layouts, strategy: Strategy, batches: Sequence[Window]) -> tuple[float, float]:
    """Seconds of one interval's windows, and of what comes after them if they are the step's last."""
    estimate = layouts.costs.step(strategy, dealt(layouts.costs, strategy, batches))
    return max(estimate.pipeline_seconds), estimate.tail_seconds


def plan_buckets(layouts: Layouts, steps: Sequence[Lengths], switch_seconds: float | None = None) -> Buckets:
    """The intervals and their strategies with the least mean of these steps.

    Raises:
        PlannerError: no homogeneous strategy holds a document of the whole context.
    """
    context = layouts.context
    inner = [context >> n for n in range(HALVINGS, 0, -1) if context >> n >= LEAST_END]
    known: dict[tuple[int, int], Bucket | None] = {}
    best: tuple[float, Buckets] | None = None
    for count in range(len(inner) + 1):
        for chosen in combinations(inner, count):
            found = []
            for low, end in pairwise((0, *chosen, context)):
                if (low, end) not in known:
                    known[low, end] = _best_bucket(layouts, steps, low, end)
                found.append(known[low, end])
            buckets = [each for each in found if each is not None]
            if len(buckets) < len(found):
                continue
            made = Buckets(layouts, buckets, switch_seconds)
            seconds = made.mean(steps)
            if best is None or seconds < best[0]:
                best = seconds, made
    if best is None:
        raise PlannerError(
            f"HotSPa's buckets: no homogeneous strategy of DP, TP and PP on {len(layouts.ranks)} devices holds a document "
            f"of {context} tokens; use more devices or a smaller seq_length"
        )
    return best[1]


def _best_bucket(layouts: Layouts, steps: Sequence[Lengths], low: int, end: int) -> Bucket | None:
    """The homogeneous strategy that is best for the documents of an interval; None where none holds them."""
    packed = [windows([n for n in step.tolist() if low < n <= end], end) for step in steps]
    packed = [each for each in packed if each] or [[(end,)]]
    timed: list[tuple[float, Bucket, Strategy]] = []
    for layout in layouts.all:
        count, rest = divmod(len(layouts.ranks), layout.devices)
        if rest or layout.cp > 1 or layout.recompute != "none":
            continue
        try:
            strategy = fitting(layouts, [(layout, count, end)])
        except PlannerError:
            continue
        timed.append((_interval(layouts, strategy, packed[0])[0], (end, layout, count), strategy))
    timed.sort(key=lambda each: each[:2])
    means = [
        (float(np.mean([_interval(layouts, strategy, each)[0] for each in packed])), bucket)
        for _, bucket, strategy in timed[:FULLY_TIMED]
    ]
    return min(means)[1] if means else None
