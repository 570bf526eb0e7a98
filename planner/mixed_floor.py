"""The least that a step of mixed lengths could take: no bubble, nothing left over, nothing exposed (paper A.1, c)."""

from collections.abc import Sequence

import numpy as np

from hetero_megatron.planner.layouts import Layouts
from hetero_megatron.planner.length_sample import Lengths


def floor_seconds(layouts: Layouts, steps: Sequence[Lengths]) -> tuple[float, ...]:
    """Per step: every document where it takes least device time of all layouts that hold it, over all devices.

    Of a pipeline only its layers' and ends' own work counts, no constant, no bubble and no exchange of parameters.
    """
    devices = len(layouts.ranks)
    options = [
        (layout, layouts.capacity(layout, devices // layout.devices * layout.cp))
        for layout in layouts.all
        if layout.recompute in ("none", "full")
    ]
    lengths = np.unique(np.concatenate([np.asarray(step) for step in steps]))
    best = np.full(len(lengths), np.inf)
    for layout, most in options:
        if most * 64 < layouts.context:
            continue
        # All stages together: the slowest stage is no measure of the work of the others.
        trial = layouts.pipeline(layout, layouts.ranks)
        work = layouts.work(layout)
        share = sum(
            layouts.costs.chunk(trial, stage, 0, 4096, 4096 * 1024).total for stage in range(layout.pp)
        ) / (
            layout.pp
            * max(layouts.costs.chunk(trial, s, 0, 4096, 4096 * 1024).total for s in range(layout.pp))
        )
        least = work.least(lengths) * layout.devices * share
        best = np.where(lengths <= most, np.minimum(best, least), best)
    return tuple(float(best[np.searchsorted(lengths, step)].sum()) / devices for step in steps)
