"""`make_plan`: from a model, a cluster and a batch to a strategy, and how far it can be from the best (paper A.1 (a))."""

import time
from dataclasses import dataclass, field

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.drafts import TIMED_DEVICES, Drafts
from hetero_megatron.planner.exact import exact, is_small
from hetero_megatron.planner.guided import Effort, guided
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.infeasible import why_infeasible
from hetero_megatron.planner.level_two import closed_form, deal_micro_batches, split_layers
from hetero_megatron.planner.level_two_ilp import deal_micro_batches_ilp, split_layers_ilp
from hetero_megatron.planner.minlp import MOST_DEVICES, solve_minlp
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.realize import Priced, polish, price, strategies
from hetero_megatron.planner.sketch import Draft, Sketch
from hetero_megatron.planner.solver import NONE, Solver, SolverTrouble, with_fallback
from hetero_megatron.planner.survival import lost_layers
from hetero_megatron.strategy import Strategy

FINALISTS = 24
"""Drafts that get ranks and are timed by the cost model."""
POLISHED = 4
SAFE = 1.05
"""Where several pipelines and no ZeRO-1 are asked for, a plan that outlives every node may take so much longer."""


@dataclass(frozen=True)
class Plan:
    """A strategy and what is known about it.

    Attributes:
        best: the strategy, its predicted step and memory.
        bound_seconds: what no strategy on this cluster can be faster than under this cost model: all work over the
            speed of all devices, each at its best.
        homogeneous: the best homogeneous strategy, None where none fits.
        runner_up: the best plan of another shape, None where there is no other.
        method: who made the plan, and who confirmed it.
        notes: what a person should know: solvers that were missing, devices that are idle.
        optimal: whether the search was exhaustive up to sound pruning.
        seconds: wall time that planning took.
    """

    problem: Problem
    costs: Costs
    best: Priced
    bound_seconds: float
    homogeneous: Priced | None
    runner_up: Priced | None
    method: str
    notes: tuple[str, ...]
    optimal: bool
    seconds: float
    drafts: Drafts = field(repr=False, compare=False)
    found: tuple[Draft, ...] = field(repr=False, compare=False)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the plan."""
        return self.best.strategy

    @property
    def gap(self) -> float:
        """How far the plan's step is above the bound, as a share of the bound."""
        return self.best.seconds / self.bound_seconds - 1


def make_plan(
    problem: Problem,
    costs: Costs,
    solver: Solver | None = None,
    effort: Effort | None = None,
    minlp: bool = False,
) -> Plan:
    """The best strategy that is found; never worse than the best homogeneous one.

    `solver` confirms layers and micro-batches. With `minlp`, SCIP proposes the first level of small problems as well.

    Raises:
        PlannerError: nothing fits, with what is needed and what there is.
    """
    began, solver = time.perf_counter(), solver or Solver()
    drafts = Drafts(Prices(problem, costs))
    zeros = problem.choices.zero
    proposed, trouble = _proposed(drafts, max(zeros)) if minlp else ((), "")
    if effort is None:
        effort = Effort() if len(problem.cluster.devices) <= TIMED_DEVICES else Effort(sketches=1200)
    found = guided(drafts, max(zeros), effort, proposed)
    candidates = finalists(found, problem, costs)
    even = homogeneous(problem, costs)
    best = min([*candidates, *([even] if even else [])], key=lambda each: each.seconds, default=None)
    best = _safest(problem, candidates, best)
    optimal = False
    if is_small(problem):
        best, optimal = exact(problem, costs, best)
    if best is None:
        raise PlannerError(why_infeasible(problem, drafts.prices))
    confirmed = _confirmed(drafts, found, best, solver)
    method = "exhaustive search with sound pruning" if optimal else "guided search"
    if best is even:
        method = "best homogeneous strategy: no heterogeneous one is faster"
    notes = tuple(note for note in (trouble, confirmed, _idle(best.strategy)) if note)
    if not confirmed and solver.name != NONE:
        method += f", layers and micro-batches confirmed by {solver.name}"
    return Plan(
        problem,
        costs,
        best,
        drafts.bound(),
        even,
        _runner_up(candidates, best),
        method,
        notes,
        optimal,
        time.perf_counter() - began,
        drafts,
        tuple(found),
    )


def _proposed(drafts: Drafts, zero: int) -> tuple[tuple[Sketch, ...], str]:
    """What SCIP makes of the first level, and a sentence where it cannot."""
    problem = drafts.prices.problem
    devices = len(problem.cluster.devices)
    if devices > MOST_DEVICES:
        return (
            (),
            f"The MINLP is for up to {MOST_DEVICES} devices, and there are {devices}: guided search only.",
        )
    try:
        _, sketch, _, _ = solve_minlp(drafts.prices, problem.rows[0], zero, min(3, devices), min(4, devices))
        return (sketch,), ""
    except SolverTrouble as error:
        return (), f"{error}. The own search made this plan."


def finalists(found: list[Draft], problem: Problem, costs: Costs) -> list[Priced]:
    """The best drafts with ranks, timed by the cost model, ascending; the best of them polished."""
    priced: list[Priced] = []
    limit = float("inf")
    few = len(problem.cluster.devices) <= TIMED_DEVICES
    for draft in found[: FINALISTS if few else FINALISTS // 4]:
        # Ranks only add to what the pipelines of a draft take.
        if draft.pipeline_seconds >= limit:
            continue
        for strategy in strategies(draft, problem.cluster, problem.choices.zero):
            one = price(strategy, problem.cluster, costs)
            if one is not None:
                priced.append(one)
                limit = min(limit, one.seconds)
    priced.sort(key=lambda each: each.seconds)
    shapes: dict[object, Priced] = {}
    for one in priced:
        shapes.setdefault(_shape(one.strategy), one)
    # On large clusters a layer is a small part, and a step takes long to time.
    chosen = list(shapes.values())[:POLISHED] if few else []
    polished = [polish(one, problem.cluster, costs) for one in chosen]
    return sorted([*polished, *priced], key=lambda each: each.seconds)


def _safest(problem: Problem, candidates: list[Priced], best: Priced | None) -> Priced | None:
    """The fastest plan that has all layers left whichever node is lost, if it is not much slower than the best.

    Only where the problem asks for it: with several pipelines, and without ZeRO-1 (paper Appendix C.3). The exhaustive
    search of small problems looks at the step alone.
    """
    choices, layers = problem.choices, problem.config.num_layers
    if best is None or choices.zero != (0,) or min(choices.pipelines, default=1) < 2:
        return best
    nodes: dict[int, list[int]] = {}
    for device in problem.cluster.devices:
        nodes.setdefault(device.node, []).append(device.rank)
    for one in (best, *candidates):
        if one.seconds > SAFE * best.seconds:
            break
        if not any(lost_layers(one.strategy, layers, ranks) for ranks in nodes.values()):
            return one
    return best


def _shape(strategy: Strategy) -> object:
    """What makes two plans different to a person: pipelines as degrees of their stages."""
    return tuple(
        sorted(
            (p.micro_batch_size, tuple((s.tensor_parallel_sizes, len(s.ranks)) for s in p.stages))
            for p in strategy.pipelines
        )
    )


def _runner_up(candidates: list[Priced], best: Priced) -> Priced | None:
    own = _shape(best.strategy)
    return next((each for each in candidates if _shape(each.strategy) != own), None)


def _idle(strategy: Strategy) -> str:
    count = len(strategy.idle_ranks)
    return (
        f"{count} device{'s are' if count > 1 else ' is'} idle: using them makes no step shorter"
        if count
        else ""
    )


def _confirmed(drafts: Drafts, found: list[Draft], best: Priced, solver: Solver) -> str:
    """Ask the solver for layers and micro-batches of the chosen shape; empty where it agrees with the own search."""
    shape = [len(pipeline.stages) for pipeline in best.strategy.pipelines]
    draft = next(
        (d for d in found if [len(lane.blocks) for lane in d.lanes] == shape), found[0] if found else None
    )
    if draft is None or solver.name == NONE:
        return ""
    total = drafts.prices.problem.config.num_layers
    notes: dict[str, None] = {}
    for lane, count in dict(zip(draft.lanes, draft.micro_batches, strict=True)).items():
        loads = drafts.lanes.loads(lane.blocks, draft.sketch.setting, max(1, count), lane.recompute)
        m = max(1, count)
        own = split_layers(total, loads, m)
        if own is None:
            continue
        _, note = with_fallback(
            lambda loads=loads, m=m: split_layers_ilp(total, loads, m, solver),  # type: ignore[misc]
            lambda own=own: own,  # type: ignore[misc]
            lambda layers, loads=loads, m=m: closed_form(loads, layers, m),  # type: ignore[misc]
        )
        notes[note] = None
        if note:
            break
    pipelines = [lane.load for lane in draft.lanes]
    micro_batches = sum(draft.micro_batches)
    if not any(notes) and len(pipelines) <= 16:
        _, note = with_fallback(
            lambda: deal_micro_batches_ilp(micro_batches, pipelines, solver),
            lambda: deal_micro_batches(micro_batches, pipelines),
            lambda counts: max(load.seconds(n) for load, n in zip(pipelines, counts, strict=True)),
        )
        notes[note] = None
    return " ".join(note for note in notes if note)
