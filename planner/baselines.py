"""How other systems would plan the same problem, under the same cost model: each with its documented limits (paper §9).

They are planned as those systems plan, and timed as everything else is here; their own cost models and fudge factors
are not rebuilt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from hetero_megatron.cluster import Link
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.placement import place
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.realize import Priced, price
from hetero_megatron.planner.seeds import sketches
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy

MEGATRON, HEXISCALE, OOBLECK = "homogeneous", "hexiscale", "oobleck"
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        MEGATRON: "Megatron-style: equal pipelines, stages and degrees, layers evenly",
        HEXISCALE: "HexiScale-style: GPipe, TP of 1, 2, 4 or 8, layers in proportion to memory, no ZeRO",
        OOBLECK: "Oobleck-style: whole nodes, alike to its planner, equal TP within a pipeline, no ZeRO",
    }
)
HEXISCALE_SKETCHES = 60


def baselines(problem: Problem, costs: Costs, even: Priced | None = None) -> dict[str, Priced | None]:
    """The best plan of each kind, None where none fits; `even` is the homogeneous one if it is known already."""
    return {
        MEGATRON: even or homogeneous(problem, costs),
        HEXISCALE: best_of(hexiscale(problem, costs), problem, costs),
        OOBLECK: best_of(oobleck(problem), problem, costs),
    }


def hotspa(
    problem: Problem, make_costs: Callable[[Problem], Costs], buckets: Mapping[int, int]
) -> tuple[float, dict[int, Priced]] | None:
    """HotSPa-style: rows of each maximum length (`buckets`: length -> rows a step) under a homogeneous strategy of their own.

    Buckets run one after the other; switching between them is free here. None where one of them does not fit.
    """
    found: dict[int, Priced] = {}
    for length, rows in sorted(buckets.items()):
        own = replace(problem, seq_length=length, global_batch_size=rows)
        best = homogeneous(own, make_costs(own))
        if best is None:
            return None
        found[length] = best
    return sum(each.seconds for each in found.values()), found


def best_of(strategies: Iterable[Strategy], problem: Problem, costs: Costs) -> Priced | None:
    """The fastest that fits, with no recomputation where that fits, else with full recomputation."""
    best: Priced | None = None
    for strategy in strategies:
        if problem.choices.pipelines and len(strategy.pipelines) not in problem.choices.pipelines:
            continue
        found = price(strategy, problem.cluster, costs)
        if found is None and "full" in problem.choices.recompute:
            found = price(_recomputed(strategy), problem.cluster, costs)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _recomputed(strategy: Strategy) -> Strategy:
    entries = (Recompute("full"),)
    return replace(
        strategy,
        pipelines=tuple(
            replace(p, stages=tuple(replace(stage, recompute=entries) for stage in p.stages))
            for p in strategy.pipelines
        ),
    )


def hexiscale(problem: Problem, costs: Costs) -> Iterator[Strategy]:
    """Devices of each kind cut alike, dealt over pipelines; layers in proportion to memory, batches alike."""
    plain = replace(
        problem,
        choices=replace(
            problem.choices,
            context_parallel=(1,),
            tensor_parallel=tuple(n for n in problem.degrees if n in (1, 2, 4, 8)),
        ),
    )
    speed = {
        block: 1 / costs.layer(block.kind, block.tp, 1, _link(problem, block), (problem.seq_length,)).total
        for own in plain.blocks.values()
        for block in own
    }
    made = list(sketches(plain, speed, 0))
    # Most devices first; of those, fewer stages for each micro-batch.
    made.sort(
        key=lambda sketch: (
            -sum(block.ranks for block in sketch.blocks),
            max(map(len, sketch.lanes)) * len(sketch.lanes) * sketch.rows,
            sketch.lanes,
        )
    )
    for sketch in made[:HEXISCALE_SKETCHES]:
        layers = [_by_memory(problem, lane) for lane in sketch.lanes]
        counts = _evenly(problem.global_batch_size // sketch.rows, len(sketch.lanes))
        strategy = _strategy(problem, sketch.lanes, layers, counts, sketch.rows)
        if strategy is not None:
            yield replace(strategy, schedule="gpipe")


def _link(problem: Problem, block: Block) -> Link:
    return next(kind.link for kind in problem.cluster.kinds if kind.name == block.kind)


def _by_memory(problem: Problem, lane: Blocks) -> tuple[int, ...]:
    """Layers in proportion to the memory of each stage, one at least; what is left over goes to the largest rests."""
    memory = {kind.name: kind.memory_bytes for kind in problem.cluster.kinds}
    weights = [block.ranks * memory[block.kind] for block in lane]
    spare = problem.config.num_layers - len(lane)
    exact = [spare * weight / sum(weights) for weight in weights]
    layers = [1 + int(share) for share in exact]
    order = sorted(range(len(lane)), key=lambda s: (int(exact[s]) - exact[s], s))
    for s in order[: problem.config.num_layers - sum(layers)]:
        layers[s] += 1
    return tuple(layers)


def oobleck(problem: Problem) -> Iterator[Strategy]:
    """Pipelines of whole nodes, as many on each as can be; stages of equal degree; layers evenly, batches by nodes."""
    nodes: dict[int, list[str]] = {}
    for device in problem.cluster.devices:
        nodes.setdefault(device.node, []).append(device.kind)
    largest = max(map(len, nodes.values()))
    # A node that lost a device is no whole node, and one of two kinds is none that the planner knows.
    whole = [own[0] for _, own in sorted(nodes.items()) if len(own) == largest and len(set(own)) == 1]
    for tp in (n for n in problem.degrees if largest % n == 0):
        for pipelines in range(1, min(len(whole), problem.global_batch_size) + 1):
            shares = _evenly(len(whole), pipelines)
            ends = list(accumulate(shares, initial=0))
            lanes = [
                tuple(Block(kind, tp) for kind in whole[first:end] for _ in range(largest // tp))
                for first, end in pairwise(ends)
            ]
            if any(len(lane) > problem.config.num_layers for lane in lanes):
                continue
            layers = [_evenly(problem.config.num_layers, len(lane)) for lane in lanes]
            for rows in problem.rows:
                total = problem.global_batch_size // rows
                counts = _evenly(total, pipelines)
                if total >= pipelines:
                    strategy = _strategy(problem, lanes, layers, counts, rows)
                    if strategy is not None:
                        yield strategy


def _evenly(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (n < total % parts) for n in range(parts))


def _strategy(
    problem: Problem,
    lanes: Sequence[Blocks],
    layers: Sequence[Sequence[int]],
    counts: Sequence[int],
    rows: int,
) -> Strategy | None:
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
