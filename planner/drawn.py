"""Strategies that other systems' rules draw: blocks, layers and micro-batches as given, ranks inside nodes (paper §9)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.placement import place
from hetero_megatron.planner.problem import Problem
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy


def evenly(total: int, parts: int) -> tuple[int, ...]:
    """`total` in so many parts, the first ones larger by 1 where it does not divide."""
    return tuple(total // parts + (n < total % parts) for n in range(parts))


def strategy_of_blocks(
    problem: Problem,
    lanes: Sequence[Blocks],
    layers: Sequence[Sequence[int]],
    counts: Sequence[int],
    rows: int,
) -> Strategy | None:
    """Without ZeRO; devices that are left over are idle. None where a block has no node to lie in."""
    ranks = place(problem.cluster, lanes)
    if ranks is None:
        return None
    pipelines = []
    for p, own in enumerate(layers):
        ends = accumulate(own, initial=0)
        stages = tuple(
            Stage(ranks[p, s], (first, end - 1), lanes[p][s].tp)
            for s, (first, end) in enumerate(pairwise(ends))
        )
        pipelines.append(Pipeline(counts[p], rows, stages))
    used = {rank for own in ranks.values() for rank in own}
    idle = tuple(rank for rank in problem.cluster.ranks if rank not in used)
    return Strategy(tuple(pipelines), 0, idle_ranks=idle)


def recomputed(strategy: Strategy) -> Strategy:
    """The same with all layers recomputed."""
    entries = (Recompute("full"),)
    return replace(
        strategy,
        pipelines=tuple(
            replace(p, stages=tuple(replace(stage, recompute=entries) for stage in p.stages))
            for p in strategy.pipelines
        ),
    )
