"""How Oobleck would plan: pipeline templates of whole nodes, and as many pipelines of them as cover all nodes (paper §9 b).

After Oobleck (SOSP 2023, arXiv 2309.08125, its sections 4.1 and 4.2). Its limits, kept here:

- Devices come in whole nodes of one size: a node that lost a device is out.
- There is one template for each number of nodes, made as if all nodes were of one kind. Of the ways to cut its nodes
  into stages it takes the one with the least T1 + T2 + T3 of its equations 1 to 4, for 4 micro-batches per stage.
- Templates have from as few nodes as hold the model to as many as leave room for the other replicas, of which there
  are at least f + 1, here 2: with fewer nodes it has no plan.
- Pipelines cover all nodes exactly; micro-batches are dealt so that the slowest pipeline is done soonest, as its
  templates predict it.
- 1F1B, no ZeRO (replicas are the copies that recovery needs), no context parallelism.

In its favour: a template's layers, and recomputation where it helps memory, are chosen as our own level 2 does; for
each kind of node of a mixed cluster there is a set of templates made for that kind, and the best set counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.lanes import Blocks, Lane, Lanes, Setting
from hetero_megatron.planner.level_two import deal_micro_batches
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.realize import Priced, price, strategy_of
from hetero_megatron.planner.sketch import Draft, Sketch

FAULTS = 1
"""Failures at a time that all state outlives: so many replicas and one more."""
PER_STAGE = 4
"""Micro-batches per stage that a template is chosen for (Oobleck, section 4.1.2)."""
MOST_NODES, MOST_LARGE, TIMED = 16, 8, 8
"""Nodes up to which every mixture of templates is looked at; nodes of the largest template on larger clusters, unless
the model needs more; mixtures that the cost model times."""


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline on so many nodes."""

    nodes: int
    lane: Lane
    seconds: float


def oobleck(problem: Problem, costs: Costs, faults: int = FAULTS) -> Priced | None:
    """The fastest plan within Oobleck's limits, or None where there is none."""
    nodes = whole_nodes(problem)
    best: Priced | None = None
    for kind in dict.fromkeys(kind for kind, _ in nodes):
        found: list[tuple[float, int, tuple[Template, ...], tuple[int, ...]]] = []
        lanes = Lanes(Prices(problem, costs))
        for rows in problem.rows:
            made = templates(problem, lanes, kind, rows, len(nodes), len(nodes[0][1]), faults)
            for chosen in mixtures(made, len(nodes), faults + 1):
                total = problem.global_batch_size // rows
                if total < len(chosen) or (
                    problem.choices.pipelines and len(chosen) not in problem.choices.pipelines
                ):
                    continue
                loads = [each.lane.load for each in chosen]
                counts = deal_micro_batches(total, loads)
                seconds = max(load.seconds(n) for load, n in zip(loads, counts, strict=True))
                found.append((seconds, rows, chosen, counts))
        found.sort(key=lambda each: each[:2])
        few = len(nodes) <= MOST_NODES
        for _, _, chosen, counts in found[: TIMED if few else TIMED // 4]:
            if min(counts) < 1:
                continue
            draft = Draft(
                Sketch.of([each.lane.blocks for each in chosen], chosen[0].lane.rows, 0),
                tuple(each.lane for each in chosen),
                counts,
                0.0,
                0.0,
            )
            strategy = strategy_of(draft, _ranks(chosen, [own for _, own in nodes]), problem.cluster, 0)
            priced = price(strategy, problem.cluster, costs)
            if priced is not None and (best is None or priced.seconds < best.seconds):
                best = priced
    return best


def whole_nodes(problem: Problem) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and ranks of the nodes with as many devices as any has, all of one kind."""
    nodes: dict[int, list[tuple[str, int]]] = {}
    for device in problem.cluster.devices:
        nodes.setdefault(device.node, []).append((device.kind, device.rank))
    largest = max(map(len, nodes.values()))
    return [
        (own[0][0], tuple(rank for _, rank in own))
        for _, own in sorted(nodes.items())
        if len(own) == largest and len({kind for kind, _ in own}) == 1
    ]


def templates(
    problem: Problem, lanes: Lanes, kind: str, rows: int, nodes: int, size: int, faults: int
) -> tuple[Template, ...]:
    """The best pipeline of every number of nodes that holds the model, fewest nodes first."""
    found: list[Template] = []
    most = nodes - faults
    count = 1
    while count <= most:
        best: Template | None = None
        for blocks in _cuts(problem, kind, count, size):
            micro_batches = PER_STAGE * len(blocks)
            lane = lanes.best(blocks, Setting(rows, faults + 1, 0), micro_batches)
            if lane is None:
                continue
            each = [
                sum(one) for one in lanes.stage_seconds(blocks, rows, lane.layers, lane.again, lane.recompute)
            ]
            seconds = template_seconds(each, micro_batches)
            if best is None or seconds < best.seconds:
                best = Template(count, lane, seconds)
        if best is not None:
            if not found:
                # The other replicas have as few nodes as hold the model, too.
                most = nodes - faults * count
                if nodes > MOST_NODES:
                    most = min(most, max(MOST_LARGE, 2 * count))
            if count <= most:
                found.append(best)
        count += 1
    return tuple(found)


def template_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """Oobleck's T1 + T2 + T3: all stages once, the slowest in between, and from the last slowest one to the end.

    >>> template_seconds([1.0, 2.0, 1.0], 12)
    27.0
    """
    slowest = max(range(len(stages)), key=lambda s: (stages[s], s))
    between = micro_batches - len(stages) + slowest
    return sum(stages) + between * stages[slowest] + sum(stages[slowest:])


def _cuts(problem: Problem, kind: str, nodes: int, size: int) -> Iterator[Blocks]:
    """Stages of equal size in a node, in all nodes alike or in the first or the last node of another size."""
    sizes = [tp for tp in problem.degrees if size % tp == 0 and tp <= size]

    def node(tp: int) -> Blocks:
        return (Block(kind, tp),) * (size // tp)

    for tp in sizes:
        yield node(tp) * nodes
        if nodes > 1:
            for other in sizes:
                if other != tp:
                    yield node(other) + node(tp) * (nodes - 1)
                    if nodes > 2:
                        yield node(tp) * (nodes - 1) + node(other)


def mixtures(made: Sequence[Template], nodes: int, least: int) -> Iterator[tuple[Template, ...]]:
    """At least `least` templates that have so many nodes together, largest first; of many nodes, two sizes at most."""
    by_size = {each.nodes: each for each in made}
    sizes = sorted(by_size, reverse=True)

    def parts(left: int, largest: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for size in (size for size in sizes if size <= min(left, largest)):
            for rest in parts(left - size, size):
                yield (size, *rest)

    def near() -> Iterator[tuple[int, ...]]:
        for count in range(least, nodes + 1):
            each, over = divmod(nodes, count)
            yield (each + 1,) * over + (each,) * (count - over)

    for chosen in parts(nodes, nodes) if nodes <= MOST_NODES else near():
        if len(chosen) >= least and all(size in by_size for size in chosen):
            yield tuple(by_size[size] for size in chosen)


def _ranks(
    chosen: Sequence[Template], nodes: Sequence[tuple[int, ...]]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Nodes in their order to pipelines in theirs."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    first = 0
    for p, template in enumerate(chosen):
        ranks = [rank for own in nodes[first : first + template.nodes] for rank in own]
        first += template.nodes
        for s, block in enumerate(template.lane.blocks):
            found[p, s], ranks = tuple(ranks[: block.tp]), ranks[block.tp :]
    return found
