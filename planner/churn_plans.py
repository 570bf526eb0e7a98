"""Plans for every set of devices that a run under churn can come to, each shape planned once.

Nodes of one kind with equally many devices are alike, so a plan for a shape holds for every set of that shape; it gets
the ranks of the set at hand.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from hetero_megatron.cluster import Cluster, Device
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.churn import Ranks, Work
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.oobleck import oobleck
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.sketch import Draft
from hetero_megatron.planner.solver import NONE, Solver
from hetero_megatron.strategy import Strategy

Shape = tuple[tuple[str, int], ...]
"""Per node its kind and how many devices it has; kinds in the cluster's order, the largest nodes first."""
REDUNDANT = (2, 3, 4)
"""Pipelines of plans of which one can be lost."""
KEPT = 12
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShapePlans:
    """What there is to run on a shape, ranks counted from 0 through its nodes; None where nothing fits.

    Attributes:
        redundant: without ZeRO and with two pipelines or more where they fit: a loss leaves the state with survivors.
        drafts: of the planning of `redundant`, the fastest first.
        fastest: with ZeRO or without, as many pipelines as one likes: for who restarts from checkpoints.
        even: the fastest that is homogeneous, on all devices or on the whole nodes.
        templates: Oobleck's, always with two pipelines or more.
    """

    redundant: Work | None
    drafts: tuple[Draft, ...]
    fastest: Work | None
    even: Work | None
    templates: Work | None


@dataclass(frozen=True)
class Plans:
    """Plans by shape, made when they are asked for first; `full` is the problem on all devices."""

    full: Problem

    @cached_property
    def by_shape(self) -> dict[Shape, ShapePlans]:
        """What was planned so far."""
        return {}

    @cached_property
    def replanned(self) -> dict[tuple[Ranks, Work, float], tuple[Work, float] | None]:
        """The next work and the seconds of the move, by who is there, what ran, and the horizon; None: no such way."""
        return {}

    @cached_property
    def costs(self) -> Costs:
        """Of the full cluster."""
        return costs_of(self.full)

    @cached_property
    def plan(self) -> Plan:
        """The plan with redundancy for the full cluster, from which others are re-planned."""
        found = redundant_plan(self.full)
        if found is None:
            raise PlannerError("no plan fits the full cluster")
        return found

    def of(self, present: Ranks) -> ShapePlans:
        """The plans for these devices, with their ranks."""
        nodes = self._nodes(present)
        shape = tuple((kind, len(ranks)) for kind, ranks in nodes)
        if shape not in self.by_shape:
            self.by_shape[shape] = plan_shape(self.full, shape)
        names = dict(enumerate(rank for _, ranks in nodes for rank in ranks))
        found = self.by_shape[shape]
        named: Callable[[Work | None], Work | None] = partial(_named, names=names)
        return ShapePlans(
            named(found.redundant),
            found.drafts,
            named(found.fastest),
            named(found.even),
            named(found.templates),
        )

    def prepare(self, sets: Iterable[Ranks], processes: int) -> int:
        """Plan for all of these sets in processes; returns for how many shapes."""
        wanted = dict.fromkeys(
            tuple((kind, len(ranks)) for kind, ranks in self._nodes(present)) for present in sets if present
        )
        missing = [shape for shape in wanted if shape not in self.by_shape]
        # The large ones take longest.
        missing.sort(key=lambda shape: -sum(count for _, count in shape))
        if processes < 2 or len(missing) < 2:
            made = [plan_shape(self.full, shape) for shape in missing]
        else:
            with ProcessPoolExecutor(processes) as pool:
                made = list(pool.map(partial(plan_shape, self.full), missing))
        self.by_shape.update(zip(missing, made, strict=True))
        return len(missing)

    def _nodes(self, present: Ranks) -> list[tuple[str, list[int]]]:
        order = {kind.name: number for number, kind in enumerate(self.full.cluster.kinds)}
        nodes: dict[tuple[str, int], list[int]] = {}
        for device in self.full.cluster.devices:
            if device.rank in present:
                nodes.setdefault((device.kind, device.node), []).append(device.rank)
        ordered = sorted(nodes.items(), key=lambda each: (order[each[0][0]], -len(each[1]), each[0][1]))
        return [(kind, ranks) for (kind, _), ranks in ordered]


def plan_shape(full: Problem, shape: Shape) -> ShapePlans:
    """All plans for one shape; pure."""
    devices: list[Device] = []
    for node, (kind, count) in enumerate(shape):
        devices += [Device(len(devices) + place, kind, node) for place in range(count)]
    known = full.cluster
    names = dict.fromkeys(kind for kind, _ in shape)
    kinds = tuple(kind for kind in known.kinds if kind.name in names)
    problem = replace(full, cluster=Cluster(tuple(devices), kinds, known.inter_node))
    costs, anything = costs_of(problem), replace(problem, choices=replace(full.choices, pipelines=()))
    kept = redundant_plan(problem)
    fastest = _or_none(lambda: make_plan(anything, costs, Solver(NONE)))
    redundant, free = (
        None if found is None else Work(found.strategy, found.best.seconds) for found in (kept, fastest)
    )
    either = [work for work in (redundant, free) if work is not None]
    return ShapePlans(
        redundant,
        () if kept is None else kept.found[:KEPT],
        min(either, key=lambda work: work.step_seconds, default=None),
        _even(anything, costs),
        _templates(problem, costs),
    )


def redundant_plan(problem: Problem) -> Plan | None:
    """Without ZeRO, in two pipelines or more where they fit."""
    costs = costs_of(problem)
    for pipelines in (REDUNDANT, ()):
        choices = replace(problem.choices, zero=(0,), pipelines=pipelines)
        own = replace(problem, choices=choices)
        found = _or_none(lambda own=own: make_plan(own, costs, Solver(NONE)))  # type: ignore[misc]
        if found is not None:
            return found
    return None


def costs_of(problem: Problem) -> Costs:
    """The cost model of a problem."""
    return Costs(problem.config, problem.cluster, None, problem.seq_length)


def _even(problem: Problem, costs: Costs) -> Work | None:
    found = [homogeneous(problem, costs)]
    sizes: dict[int, int] = {}
    for device in problem.cluster.devices:
        sizes[device.node] = sizes.get(device.node, 0) + 1
    if len(set(sizes.values())) > 1:
        broken = [d.rank for d in problem.cluster.devices if sizes[d.node] < max(sizes.values())]
        whole = replace(problem, cluster=problem.cluster.without(broken))
        found.append(homogeneous(whole, costs_of(whole)))
    works = [Work(each.strategy, each.seconds) for each in found if each is not None]
    return min(works, key=lambda work: work.step_seconds, default=None)


def _templates(problem: Problem, costs: Costs) -> Work | None:
    found = oobleck(problem, costs)
    return None if found is None else Work(found.strategy, found.seconds)


def _or_none(plan: Callable[[], Plan]) -> Plan | None:
    try:
        return plan()
    except PlannerError:
        return None


def _named(work: Work | None, names: Mapping[int, int]) -> Work | None:
    return None if work is None else replace(work, strategy=renamed(work.strategy, names))


def renamed(strategy: Strategy, names: Mapping[int, int]) -> Strategy:
    """The strategy with other ranks in the same places."""

    def own(ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(names[rank] for rank in ranks)

    pipelines = tuple(
        replace(p, stages=tuple(replace(s, ranks=own(s.ranks)) for s in p.stages)) for p in strategy.pipelines
    )
    return replace(strategy, pipelines=pipelines, idle_ranks=own(strategy.idle_ranks))
