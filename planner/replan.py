"""`replan`: another plan after ranks are lost or join, from what the first planning left behind (paper A.1 (b)).

Kept: prices of blocks, lanes worked out, drafts found. Looked at: repairs of the plan that runs (a broken stage cut in
smaller ones, made smaller or dropped; a broken pipeline dropped or shared out), drafts of the first planning that the
devices still allow, and one climb of small changes from the best of them. Chosen: the most steps until the next change is
expected, the time of the switch taken off, so that a plan that moves less wins where steps are about as long.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from math import inf

from hetero_megatron.cluster import Cluster, Device, ranges_text
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.drafts import Drafts
from hetero_megatron.planner.infeasible import why_infeasible
from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.movement import movement, overlap
from hetero_megatron.planner.moves import moves
from hetero_megatron.planner.placement import Place, place
from hetero_megatron.planner.plan import Plan
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.realize import Priced, price, strategy_of
from hetero_megatron.planner.sketch import Draft, Sketch
from hetero_megatron.planner.survival import lost_layers, lost_states
from hetero_megatron.strategy import Stage, Strategy

HORIZON_SECONDS = 1800.0
"""Seconds until the next change, where nobody knows better."""
KEPT_DRAFTS = 24
CLIMBED = 40
"""Changes of the best repair that are looked at."""
RANKED = 8
"""Drafts that get ranks, and whose movement is counted."""


@dataclass(frozen=True, slots=True)
class Replan:
    """The next plan and what the change to it costs.

    Attributes:
        cluster, costs: the devices that are there now, and what they cost.
        moved_bytes, switch_seconds: estimates of what ranks receive.
        lost_states: layers whose optimizer states no survivor has in full, as (first, last).
        seconds: wall time that planning took.
    """

    best: Priced
    cluster: Cluster
    costs: Costs
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    moved_bytes: int
    switch_seconds: float
    lost_states: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    seconds: float


def replan(
    plan: Plan,
    lost: Iterable[int] = (),
    joined: Sequence[Device] = (),
    running: Strategy | None = None,
    horizon_seconds: float = HORIZON_SECONDS,
    copied: Iterable[int] = (),
) -> Replan:
    """The plan to go on with; the global batch stays.

    `running` is the strategy that runs, the plan's own unless given; `copied` are lost ranks whose data comes from
    somewhere else, such as a checkpoint.

    Raises:
        PlannerError: the weights of some layer have no survivor, or nothing fits what is left.
        ClusterError: a lost rank is not in the cluster, a joined one is already, or no device is left.
    """
    began = time.perf_counter()
    gone = tuple(sorted(set(lost)))
    before, layers = running or plan.strategy, plan.problem.config.num_layers
    orphans = lost_layers(before, layers, set(gone) - set(copied))
    if orphans:
        raise PlannerError(
            f"after losing ranks {ranges_text(gone)}, no survivor has layers {ranges_text(orphans)}: start from a "
            "checkpoint with `plan` on the devices that are left, or plan with 2 pipelines or more from the beginning"
        )
    cluster = plan.problem.cluster.without(gone)
    if joined:
        cluster = cluster.join(joined)
    problem = replace(plan.problem, cluster=cluster)
    drafts, costs = _kept(plan, problem, bool(joined))
    found = _drafts(plan, drafts, before, set(gone))
    if len(before.pipelines) > 1 or 1 not in (problem.choices.pipelines or (1,)):
        # A plan that could lose a rank stays one that can, and becomes one where that is asked for.
        found = [draft for draft in found if len(draft.lanes) > 1] or found
    best: tuple[float, Priced, int, float] | None = None
    for draft in islice(found, RANKED):
        for strategy in _ranked(draft, before, cluster):
            priced = price(strategy, cluster, costs)
            if priced is None:
                continue
            moved = movement(before, strategy, cluster, costs)
            useful = max(horizon_seconds - moved.seconds, horizon_seconds * 0.01)
            value = priced.seconds * horizon_seconds / useful
            if best is None or value < best[0] * (1 - 1e-9):
                best = (value, priced, moved.bytes, moved.seconds)
    if best is None:
        raise PlannerError(
            f"after losing ranks {ranges_text(gone)}: " + why_infeasible(problem, drafts.prices)
        )
    missing = lost_states(before, layers, gone) if gone else ()
    return Replan(
        best[1],
        cluster,
        costs,
        gone,
        tuple(device.rank for device in joined),
        best[2],
        best[3],
        _runs(missing),
        _notes(best[1].strategy, missing),
        time.perf_counter() - began,
    )


def _notes(strategy: Strategy, missing: Sequence[int]) -> tuple[str, ...]:
    found = []
    if missing:
        found.append(
            f"ZeRO-1 kept states of layers {ranges_text(missing)} on lost ranks only: they come from a checkpoint"
        )
    if strategy.idle_ranks:
        found.append(f"ranks {ranges_text(strategy.idle_ranks)} are idle")
    return tuple(found)


def _runs(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return tuple(runs)


def _kept(plan: Plan, problem: Problem, grown: bool) -> tuple[Drafts, Costs]:
    """Drafts for the new devices that know all that the old ones knew of blocks and lanes."""
    costs = plan.costs
    if grown:
        costs = costs.on(problem.cluster)
    prices = Prices(problem, costs)
    prices.learn(plan.drafts.prices)
    drafts = Drafts(prices)
    drafts.lanes.learn(plan.drafts.lanes)
    return drafts, costs


def _drafts(plan: Plan, drafts: Drafts, before: Strategy, gone: set[int]) -> list[Draft]:
    """Drafts of everything that is looked at, the fastest first."""
    zero = max(plan.problem.choices.zero)
    found: dict[Sketch, Draft] = {}
    supply = drafts.prices.problem.supply

    def look(sketches: Iterable[Sketch], limit: int) -> None:
        for sketch in islice(sketches, limit):
            if sketch not in found and supply.holds(sketch.blocks):
                draft = drafts.draft(sketch, min((each.seconds for each in found.values()), default=inf))
                if draft is not None:
                    found[sketch] = draft

    look(_repairs(drafts.prices.problem, before, gone, zero), CLIMBED)
    look((draft.sketch for draft in plan.found if supply.holds(draft.sketch.blocks)), KEPT_DRAFTS)
    if found:
        start = min(found.values(), key=lambda draft: draft.seconds)
        look(moves(drafts.prices.problem, start.sketch), CLIMBED)
    return sorted(found.values(), key=lambda draft: (draft.seconds, draft.sketch.lanes))


def _repairs(problem: Problem, before: Strategy, gone: set[int], zero: int) -> Iterator[Sketch]:
    """The running plan with its broken stages changed."""
    lanes: list[tuple[Blocks, int]] = []
    whole: list[Blocks] = []
    rows = before.pipelines[0].micro_batch_size
    for pipeline in before.pipelines:
        blocks = [_block(problem, stage) for stage in pipeline.stages]
        alive = [sum(rank not in gone for rank in stage.ranks) for stage in pipeline.stages]
        own = tuple(block for block in blocks if block is not None)
        if len(own) < len(blocks):
            continue
        if all(count == block.ranks for count, block in zip(alive, own, strict=True)):
            whole.append(own)
            continue
        lanes.append((own, len(lanes)))
        options = [_rest(problem, block, count) for block, count in zip(own, alive, strict=True)]
        whole_others = [*whole]
        for later in before.pipelines[before.pipelines.index(pipeline) + 1 :]:
            later_blocks = [_block(problem, stage) for stage in later.stages]
            kept = tuple(block for block in later_blocks if block is not None)
            if len(kept) == len(later_blocks):
                whole_others.append(kept)
        for combined in _combined(options):
            if combined:
                yield Sketch.of([*whole_others, combined], rows, zero)
            if whole_others:
                yield Sketch.of(whole_others, rows, zero)
                # What is left of the broken pipeline strengthens another.
                for n, other in enumerate(whole_others):
                    together = tuple(sorted((*other, *combined), key=(*other, *combined).index))
                    yield Sketch.of([*whole_others[:n], together, *whole_others[n + 1 :]], rows, zero)
    if not lanes and whole:
        yield Sketch.of(whole, rows, zero)


def _block(problem: Problem, stage: Stage) -> Block | None:
    """The block that a stage is; None where its parts differ."""
    sizes = stage.tensor_parallel_sizes
    if len(set(sizes)) > 1:
        return None
    known = problem.cluster.kinds
    kind = next((d.kind for d in problem.cluster.devices if d.rank in stage.ranks), known[0].name)
    spread = len(stage.ranks) > problem.supply.largest.get(kind, len(stage.ranks))
    return Block(kind, sizes[0], len(sizes), spread)


def _rest(problem: Problem, block: Block, alive: int) -> list[Blocks]:
    """What can stand in for a block of which so many devices are left: as it is, in pieces, or nothing."""
    if alive >= block.ranks:
        return [(block,)]
    sizes = sorted(
        (b for b in problem.blocks.get(block.kind, ()) if b.cp == block.cp), key=lambda b: -b.ranks
    )
    pieces: list[Block] = []
    left = alive
    for size in sizes:
        while size.ranks <= left:
            pieces.append(size)
            left -= size.ranks
    found: list[Blocks] = [tuple(pieces[: n + 1]) for n in range(len(pieces))][::-1]
    return [*found, ()]


def _combined(options: Sequence[Sequence[Blocks]]) -> Iterator[Blocks]:
    """One choice for each stage, joined to a lane; the first choices first."""
    if not options:
        yield ()
        return
    for own in options[0]:
        for rest in _combined(options[1:]):
            yield (*own, *rest)


def _ranked(draft: Draft, before: Strategy, cluster: Cluster) -> Iterator[Strategy]:
    """The draft with ranks that stay where they hold the right layers, under the running ZeRO choice."""
    taken: dict[Place, tuple[int, ...]] = {}
    stages = [stage for pipeline in before.pipelines for stage in pipeline.stages]
    known = set(cluster.ranks)
    free = [n for n, stage in enumerate(stages) if known.issuperset(stage.ranks)]
    wanted: list[tuple[int, int, int, int]] = []
    for p, lane in enumerate(draft.lanes):
        for s, (first, end) in enumerate(pairwise(accumulate(lane.layers, initial=0))):
            block = lane.blocks[s]
            for n in free:
                own = stages[n]
                alike = own.tensor_parallel_sizes == (block.tp,) * block.cp
                if alike and cluster.kind(own.ranks[0]).name == block.kind:
                    wanted.append((-overlap(own, first, end), p, s, n))
    used: set[int] = set()
    for shared, p, s, n in sorted(wanted):
        if (p, s) not in taken and n not in used and shared < 0:
            taken[p, s] = stages[n].ranks
            used.add(n)
    for keep in (taken, {}):
        ranks = place(cluster, draft.sketch.lanes, keep)
        if ranks is not None:
            yield strategy_of(draft, ranks, cluster, draft.sketch.zero)
