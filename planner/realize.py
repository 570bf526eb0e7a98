"""From drafts to strategies with ranks, and the last layers and micro-batches moved by the cost model's own word."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.cost import Costs, Estimate
from hetero_megatron.planner.placement import PIPELINE, REPLICA, place
from hetero_megatron.planner.sketch import Draft
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy, what a step of it takes, and the bytes of its ranks."""

    strategy: Strategy
    estimate: Estimate
    memory_bytes: dict[int, int]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.estimate.seconds


def price(strategy: Strategy, cluster: Cluster, costs: Costs) -> Priced | None:
    """The strategy with its numbers, or None where a rank has not the memory."""
    memory = costs.memory(strategy)
    if any(need > cluster.kind(rank).memory_bytes for rank, need in memory.items()):
        return None
    return Priced(strategy, costs.step(strategy), memory)


def strategies(draft: Draft, cluster: Cluster, zeros: Sequence[int]) -> Iterator[Strategy]:
    """The draft with ranks: neighbours in a pipeline in one node, then replicas in one node; with each ZeRO choice."""
    seen: set[Strategy] = set()
    for together in (PIPELINE, REPLICA):
        found = place(cluster, draft.sketch.lanes, together=together)
        if found is None:
            continue
        for zero in zeros:
            made = strategy_of(draft, found, cluster, zero)
            if made not in seen:
                seen.add(made)
                yield made


def strategy_of(
    draft: Draft, ranks: dict[tuple[int, int], tuple[int, ...]], cluster: Cluster, zero: int
) -> Strategy:
    """The strategy of a draft whose stages have these ranks; devices that are left over are named as idle."""
    pipelines = []
    for p, (lane, count) in enumerate(zip(draft.lanes, draft.micro_batches, strict=True)):
        ends = list(accumulate(lane.layers, initial=0))
        stages = tuple(
            Stage(
                ranks[p, s],
                (first, end - 1),
                block.tp,
                block.cp,
                (Recompute(lane.recompute, (first, first + again - 1)),) if again else (),
            )
            for s, (block, (first, end), again) in enumerate(
                zip(lane.blocks, pairwise(ends), lane.again, strict=True)
            )
        )
        pipelines.append(Pipeline(count, lane.rows, stages))
    used = {rank for own in ranks.values() for rank in own}
    idle = tuple(rank for rank in cluster.ranks if rank not in used)
    return Strategy(
        tuple(pipelines), zero if len(pipelines) > 1 or lane.blocks[0].cp > 1 else 0, idle_ranks=idle
    )


def polish(start: Priced, cluster: Cluster, costs: Costs, rounds: int = 12) -> Priced:
    """Move single layers and micro-batches while a step gets shorter; equal pipelines change together."""
    now = start
    for _ in range(rounds):
        best: Priced | None = None
        for strategy in _shifts(now.strategy):
            found = price(strategy, cluster, costs)
            if found is not None and found.seconds < (best or now).seconds * (1 - 1e-9):
                best = found
        if best is None:
            return now
        now = best
    return now


def _shifts(strategy: Strategy) -> Iterator[Strategy]:
    alike: dict[object, list[int]] = {}
    for p, pipeline in enumerate(strategy.pipelines):
        shape = tuple((len(s.ranks), s.layers, s.tp, s.recompute) for s in pipeline.stages)
        alike.setdefault((pipeline.micro_batches, shape), []).append(p)
    for members in alike.values():
        depth = len(strategy.pipelines[members[0]].stages)
        for a in range(depth):
            for b in range(depth):
                if a != b:
                    changed = {p: _layer_moved(strategy.pipelines[p], a, b) for p in members}
                    made = [changed[p] for p in members]
                    if all(pipeline is not None for pipeline in made):
                        yield _with(strategy, {p: each for p, each in changed.items() if each is not None})
    firsts = [members[0] for members in alike.values()]
    for a in firsts:
        for b in firsts:
            one, other = strategy.pipelines[a], strategy.pipelines[b]
            if a != b and one.micro_batch_size == other.micro_batch_size and one.micro_batches > 1:
                yield _with(
                    strategy,
                    {
                        a: replace(one, micro_batches=one.micro_batches - 1),
                        b: replace(other, micro_batches=other.micro_batches + 1),
                    },
                )


def _with(strategy: Strategy, changed: dict[int, Pipeline]) -> Strategy:
    pipelines = tuple(changed.get(p, pipeline) for p, pipeline in enumerate(strategy.pipelines))
    return replace(strategy, pipelines=pipelines)


def _layer_moved(pipeline: Pipeline, giver: int, taker: int) -> Pipeline | None:
    """One layer from one stage to another; recomputed ones stay as many."""
    counts = [len(stage.layer_numbers) for stage in pipeline.stages]
    counts[giver] -= 1
    counts[taker] += 1
    if not counts[giver]:
        return None
    stages = []
    for stage, count, first in zip(pipeline.stages, counts, accumulate(counts, initial=0), strict=False):
        again = sum(entry.layers[1] - entry.layers[0] + 1 for entry in stage.recompute if entry.layers)
        again = min(again, count)
        entries = (Recompute(stage.recompute[0].kind, (first, first + again - 1)),) if again else ()
        stages.append(replace(stage, layers=(first, first + count - 1), recompute=entries))
    return replace(pipeline, stages=tuple(stages))
