"""The best homogeneous strategy, as Megatron runs one: what every plan is measured against (paper Table 8).

Limits, which are Megatron's: all pipelines, stages and tensor-parallel groups are alike; layers are spread evenly; one
micro-batch size; recomputation for all layers or none. On a mixed cluster the slowest device sets the pace; leaving
out devices, or whole kinds, is a choice as well. Ranks count through tensor-parallel groups, then stages, then
pipelines, and also through pipelines before stages, whichever is faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hetero_megatron.cluster import Cluster, DeviceKind, model_of
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.footprint import Local
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.realize import Priced, price
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy

PATIENCE = 24
"""On larger clusters, so many options in a row that are no faster end the search."""
FEW = 128
"""Devices up to which both orders of ranks and both ZeRO choices are tried; beyond, the usual ones."""


def homogeneous(problem: Problem, costs: Costs) -> Priced | None:
    """The fastest homogeneous strategy that fits, or None; on more than `FEW` devices the search is cut short."""
    options = []
    for ranks in _pools(problem.cluster):
        # Kinds among the first ranks: they become more only where a rank brings a new one.
        fresh: list[tuple[int, DeviceKind]] = []
        for place, rank in enumerate(ranks):
            kind = problem.cluster.kind(rank)
            if all(kind != known for _, known in fresh):
                fresh.append((place, kind))
        for degrees in _degrees(problem, len(ranks)):
            dp, tp, pp, cp, _ = degrees
            kinds = [kind for place, kind in fresh if place < dp * tp * pp * cp]
            if _may_fit(problem, costs, kinds, *degrees):
                options.append((_least_seconds(problem, costs, kinds, *degrees), degrees, ranks))
    best: Priced | None = None
    since = 0
    for least, degrees, ranks in sorted(options):
        if best is not None and (least >= best.seconds or since >= PATIENCE):
            break
        found = _fastest(problem, costs, ranks, *degrees)
        since += len(problem.cluster.devices) > FEW
        if found is not None and (best is None or found.seconds < best.seconds):
            best, since = found, 0
    return best


def _may_fit(
    problem: Problem,
    costs: Costs,
    kinds: Sequence[DeviceKind],
    dp: int,
    tp: int,
    pp: int,
    cp: int,
    rows: int,
) -> bool:
    """Whether the fullest stage, recomputed or not and with one micro-batch in flight, has room on every kind."""
    layers = -(-problem.config.num_layers // pp)
    kept = Stage((0,) * tp, (0, layers - 1))
    stages = [kept, *(replace(kept, recompute=(Recompute(each),)) for each in problem.choices.recompute)]
    cut = dp * cp if max(problem.choices.zero) else 1
    for kind in kinds:
        local = Local(rows * problem.seq_length // cp, tp, model_of(kind.name) == "cpu", kind.name)
        needs = [
            costs.footprint.stage(stage, local, cut, False, False, whole)
            for stage in stages
            for whole in (False, True)
        ]
        if min(fixed + weight for fixed, weight, _ in needs) > kind.memory_bytes:
            return False
    return True


def _least_seconds(
    problem: Problem,
    costs: Costs,
    kinds: Sequence[DeviceKind],
    dp: int,
    tp: int,
    pp: int,
    cp: int,
    rows: int,
) -> float:
    """The slowest device has its share of the layers and of the micro-batches, and the bubble is of the fastest."""
    lengths = (problem.seq_length,) * rows
    each = [costs.layer(kind.name, tp, cp, kind.link, lengths).total for kind in kinds]
    layers = problem.config.num_layers // pp
    return layers * (min(_counts(problem.global_batch_size, dp, rows)) * max(each) + (pp - 1) * min(each))


def _pools(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """All devices in the cluster's order, and those of each kind alone."""
    yield cluster.ranks
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    if len(kinds) > 1:
        for kind in kinds:
            yield tuple(device.rank for device in cluster.devices if device.kind == kind)


def _degrees(problem: Problem, devices: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(dp, tp, pp, cp, rows), as many devices at work as there can be."""
    layers, batch = problem.config.num_layers, problem.global_batch_size
    for tp in problem.degrees:
        for cp in problem.parts:
            for pp in range(1, min(layers, devices // (tp * cp)) + 1):
                most = devices // (tp * cp * pp)
                options = [dp for dp in range(most, 0, -1) if batch % dp == 0][:1]
                allowed = problem.choices.pipelines
                for dp in allowed or dict.fromkeys([*options, most]):
                    for rows in problem.rows:
                        if dp <= most and dp * rows <= batch:
                            yield dp, tp, pp, cp, rows


def _fastest(
    problem: Problem, costs: Costs, ranks: Sequence[int], dp: int, tp: int, pp: int, cp: int, rows: int
) -> Priced | None:
    """The first recomputation that fits, none before selective before full, in the better order of ranks."""
    few = len(problem.cluster.devices) <= FEW
    for recompute in ("none", *problem.choices.recompute):
        found = [
            price(strategy, problem.cluster, costs)
            for zero in (problem.choices.zero if few else (max(problem.choices.zero),))
            for by_stage in ((False, True) if few else (False,))
            for strategy in [even_strategy(problem, ranks, (dp, tp, pp, cp), rows, recompute, zero, by_stage)]
        ]
        fitting = [each for each in found if each is not None]
        if fitting:
            return min(fitting, key=lambda each: each.seconds)
    return None


def even_strategy(
    problem: Problem,
    ranks: Sequence[int],
    degrees: tuple[int, int, int, int],
    rows: int,
    recompute: str,
    zero: int,
    by_stage: bool,
) -> Strategy:
    """`dp` equal pipelines of `pp` stages of tp x cp ranks; `by_stage` counts ranks through pipelines first."""
    dp, tp, pp, cp = degrees
    layers, size = problem.config.num_layers, tp * cp
    each, over = divmod(layers, pp)
    ends = [0]
    for stage in range(pp):
        ends.append(ends[-1] + each + (stage < over))
    entries = () if recompute == "none" else (Recompute(recompute),)
    counts = _counts(problem.global_batch_size, dp, rows)
    pipelines = []
    for replica in range(dp):
        stages = []
        for stage, (first, end) in enumerate(pairwise(ends)):
            group = stage * dp + replica if by_stage else replica * pp + stage
            own = tuple(ranks[group * size : (group + 1) * size])
            stages.append(Stage(own, (first, end - 1), tp, cp, entries))
        pipelines.append(Pipeline(counts[replica], rows, tuple(stages)))
    used = set(ranks[: dp * pp * size])
    idle = tuple(rank for rank in problem.cluster.ranks if rank not in used)
    return Strategy(tuple(pipelines), zero if dp * cp > 1 else 0, idle_ranks=idle)


def _counts(batch: int, dp: int, rows: int) -> list[int]:
    """Micro-batches of each pipeline, together the batch; the first pipelines take what does not divide."""
    total = -(-batch // rows)
    return [total // dp + (replica < total % dp) for replica in range(dp)]
