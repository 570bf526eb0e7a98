"""Level 1 as a mixed-integer nonlinear program in Pyomo, solved by SCIP: for small inputs, and as an oracle (paper A.1).

It chooses blocks, layers and micro-batches at once, under the closed form (m - 1) slowest stage + sum of the stages;
sending, gradients and activations are left to the cost model, which times the sketch that comes out.
"""

from typing import Any

from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.level_two import StageLoad, closed_form
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block
from hetero_megatron.planner.sketch import Sketch
from hetero_megatron.planner.solver import SolverTrouble

SCIP = "scip"
REMEDY = "pip install pyomo pyscipopt"
MOST_DEVICES = 8
SECONDS = 20.0


def solve_minlp(
    prices: Prices, rows: int, zero: int, pipelines: int, stages: int, seconds: float = SECONDS
) -> tuple[float, Sketch, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The least slowest-pipeline time, and its sketch, layers and micro-batches; at most so many pipelines and stages.

    Raises:
        SolverTrouble: Pyomo or SCIP is missing, or SCIP gave no optimal solution, or its numbers do not add up.
    """
    try:
        import pyomo.environ as pyo
    except ImportError as error:
        raise SolverTrouble(SCIP, f"Pyomo is not installed ({error})", REMEDY) from error
    try:
        import pyscipopt  # noqa: F401  # Pyomo only says that SCIP is not available
    except ImportError as error:
        raise SolverTrouble(SCIP, f"PySCIPOpt is not installed ({error})", REMEDY) from error
    solver = pyo.SolverFactory("scip_direct")
    if not solver.available(exception_flag=False):
        raise SolverTrouble(SCIP, "does not run here", REMEDY)
    blocks = [
        block for own in prices.problem.blocks.values() for block in own if block.cp == 1 and not block.spread
    ]
    model = _model(pyo, prices, blocks, rows, pipelines, stages)
    try:
        result = solver.solve(model, options={"limits/time": seconds}, load_solutions=False)
        if str(result.solver.termination_condition) != "optimal":
            raise SolverTrouble(
                SCIP,
                f"stopped without an optimal solution: {result.solver.termination_condition}",
                "allow it more time",
            )
        model.solutions.load_from(result)
    except SolverTrouble:
        raise
    # Pyomo and PySCIPOpt raise errors of many kinds.
    except Exception as error:
        raise SolverTrouble(SCIP, f"failed: {' '.join(str(error).split())}", REMEDY) from error
    return _read(pyo, model, prices, blocks, rows, zero)


def _model(pyo: Any, prices: Prices, blocks: list[Block], rows: int, pipelines: int, stages: int) -> Any:
    problem = prices.problem
    layers, total = problem.config.num_layers, problem.global_batch_size // rows
    each = [prices.layer(block, rows).total for block in blocks]
    first = [prices.end(block, rows, False).total for block in blocks]
    last = [prices.end(block, rows, True).total for block in blocks]
    slowest = max(e * layers + f + h for e, f, h in zip(each, first, last, strict=True))
    m = pyo.ConcreteModel()
    m.p, m.s, m.k = range(pipelines), range(stages), range(len(blocks))
    # Is block k stage s of pipeline p? Is that the last stage?
    m.is_block = pyo.Var(m.p, m.s, m.k, domain=pyo.Binary)
    m.is_last = pyo.Var(m.p, m.s, m.k, domain=pyo.Binary)
    m.layers = pyo.Var(m.p, m.s, m.k, domain=pyo.NonNegativeIntegers, bounds=(0, layers))
    m.stage = pyo.Var(m.p, m.s, bounds=(0, slowest))
    m.slowest = pyo.Var(m.p, bounds=(0, slowest))
    m.count = pyo.Var(m.p, domain=pyo.NonNegativeIntegers, bounds=(0, total))
    m.time = pyo.Var(bounds=(0, total * slowest * stages))
    m.rules = pyo.ConstraintList()

    def used(p: int, s: int) -> Any:
        return sum(m.is_block[p, s, k] for k in m.k) if s < stages else 0

    for p in m.p:
        for s in m.s:
            m.rules.add(used(p, s) <= 1)
            m.rules.add(sum(m.is_last[p, s, k] for k in m.k) == used(p, s) - used(p, s + 1))
            for k in m.k:
                m.rules.add(m.is_last[p, s, k] <= m.is_block[p, s, k])
                m.rules.add(m.layers[p, s, k] <= layers * m.is_block[p, s, k])
                m.rules.add(m.layers[p, s, k] >= m.is_block[p, s, k])
            m.rules.add(
                m.stage[p, s]
                == sum(
                    each[k] * m.layers[p, s, k]
                    + last[k] * m.is_last[p, s, k]
                    + (first[k] * m.is_block[p, s, k] if s == 0 else 0)
                    for k in m.k
                )
            )
            m.rules.add(m.slowest[p] >= m.stage[p, s])
        m.rules.add(sum(m.layers[p, s, k] for s in m.s for k in m.k) == layers * used(p, 0))
        m.rules.add(m.count[p] <= total * used(p, 0))
        m.rules.add(m.count[p] >= used(p, 0))
        m.rules.add(m.time >= (m.count[p] - 1) * m.slowest[p] + sum(m.stage[p, s] for s in m.s))
        if p:
            m.rules.add(m.count[p] <= m.count[p - 1])
    m.rules.add(sum(m.count[p] for p in m.p) == total)
    for kind, own in problem.blocks.items():
        for size in sorted({block.ranks for block in own}):
            taken = sum(
                blocks[k].ranks // size * m.is_block[p, s, k]
                for p in m.p
                for s in m.s
                for k in m.k
                if blocks[k].kind == kind and blocks[k].ranks >= size
            )
            m.rules.add(taken <= problem.supply.room(kind, size))
    m.goal = pyo.Objective(expr=m.time)
    return m


def _read(
    pyo: Any, model: Any, prices: Prices, blocks: list[Block], rows: int, zero: int
) -> tuple[float, Sketch, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The solution, checked with plain arithmetic."""
    found: list[tuple[Blocks, tuple[int, ...], int]] = []
    for p in model.p:
        lane: list[Block] = []
        layers: list[int] = []
        for s in model.s:
            for k in model.k:
                if pyo.value(model.is_block[p, s, k]) > 0.5:
                    lane.append(blocks[k])
                    layers.append(round(pyo.value(model.layers[p, s, k])))
        if lane:
            found.append((tuple(lane), tuple(layers), round(pyo.value(model.count[p]))))
    problem = prices.problem
    total = problem.global_batch_size // rows
    if sum(count for _, _, count in found) != total:
        raise SolverTrouble(
            SCIP, f"dealt {sum(c for _, _, c in found)} micro-batches of {total}", "name none"
        )
    if any(sum(layers) != problem.config.num_layers or min(layers) < 1 for _, layers, _ in found):
        raise SolverTrouble(SCIP, "gave a pipeline that has not every layer once", "name none")
    if not problem.supply.holds([block for lane, _, _ in found for block in lane]):
        raise SolverTrouble(SCIP, "used more devices than there are", "name none")
    found.sort(reverse=True)
    sketch = Sketch.of([lane for lane, _, _ in found], rows, zero)
    value = max(closed_form(ends(prices, lane, rows), layers, count) for lane, layers, count in found)
    return value, sketch, tuple(layers for _, layers, _ in found), tuple(count for _, _, count in found)


def ends(prices: Prices, lane: Blocks, rows: int) -> list[StageLoad]:
    """Loads without memory limits: layers, embedding and head."""
    found = []
    for s, block in enumerate(lane):
        fixed = prices.end(block, rows, False).total if s == 0 else 0.0
        fixed += prices.end(block, rows, True).total if s == len(lane) - 1 else 0.0
        found.append(StageLoad(fixed, prices.layer(block, rows).total))
    return found
