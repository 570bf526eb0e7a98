"""Level 2 as integer linear programs, solved through PuLP (paper A.1)."""

from collections.abc import Sequence

from hetero_megatron.planner.level_two import (
    PipelineLoad,
    StageLoad,
    check_counts,
    check_layers,
    check_micro_batches,
)
from hetero_megatron.planner.solver import Integers, NoAnswer, Row, Solver, solve


def split_layers_ilp(
    total: int, stages: Sequence[StageLoad], micro_batches: int, solver: Solver
) -> tuple[int, ...]:
    """Kept layers a_s and recomputed layers r_s of each stage, and the slowest stage's seconds T.

    min (m - 1) T + sum of seconds_s, where seconds_s = fixed_s + per_layer_s a_s + again_s r_s <= T,
    sum (a_s + r_s) = total, a_s + r_s >= 1, layer_bytes_s a_s + again_bytes_s r_s <= room_bytes_s.

    Raises:
        SolverTrouble: the solver cannot be used, or its answer is no solution.
        NoAnswer: the layers do not fit.
    """
    count, unit = len(stages), max(stage.fixed + stage.per_layer for stage in stages) or 1.0
    if any(stage.room_bytes < 0 for stage in stages):
        raise NoAnswer

    def row(kept: Sequence[float], again: Sequence[float], slowest: float) -> tuple[float, ...]:
        return (*kept, *again, slowest)

    def only(s: int, value: float) -> list[float]:
        return [value if n == s else 0.0 for n in range(count)]

    rows: list[Row] = [(row([1.0] * count, [1.0] * count, 0.0), True, float(total))]
    for s, stage in enumerate(stages):
        seconds = row(only(s, -stage.per_layer / unit), only(s, -stage.again / unit), 1.0)
        rows.append((seconds, False, stage.fixed / unit))
        rows.append((row(only(s, 1.0), only(s, 1.0), 0.0), False, 1.0))
        if stage.layer_bytes * total > stage.room_bytes:
            scale = stage.layer_bytes
            bytes_held = row(only(s, -1.0), only(s, -stage.again_bytes / scale), 0.0)
            rows.append((bytes_held, False, -stage.room_bytes / scale))
    top = max(stage.fixed + max(stage.per_layer, stage.again) * total for stage in stages) / unit
    problem = Integers(
        row(
            [stage.per_layer / unit for stage in stages],
            [stage.again / unit for stage in stages],
            float(max(micro_batches - 1, 0)),
        ),
        (0.0,) * (2 * count + 1),
        row([float(total)] * count, [float(total) if stage.again else 0.0 for stage in stages], top),
        (*[True] * (2 * count), False),
        tuple(rows),
    )
    values = solve(problem, solver)
    layers = tuple(int(values[s] + values[count + s]) for s in range(count))
    check_layers(total, stages, layers)
    return layers


def deal_micro_batches_ilp(total: int, pipelines: Sequence[PipelineLoad], solver: Solver) -> tuple[int, ...]:
    """Micro-batches m_p, a switch u_p that is 1 where m_p > 0, and the slowest pipeline's seconds T.

    min T, where (first_p - each_p) u_p + each_p m_p <= T, m_p <= total u_p, sum m_p = total.

    Raises:
        SolverTrouble: the solver cannot be used, or its answer is no solution.
        PlannerError: there is no micro-batch or no pipeline.
    """
    count = len(pipelines)
    check_counts(total, count)
    unit = max(load.first for load in pipelines) or 1.0
    rows: list[Row] = [((*[1.0] * count, *[0.0] * count, 0.0), True, float(total))]
    for p, load in enumerate(pipelines):
        here = [float(n == p) for n in range(count)]
        each = [-load.each / unit * on for on in here]
        start = [-(load.first - load.each) / unit * on for on in here]
        rows.append(((*each, *start, 1.0), False, 0.0))
        rows.append(((*(-on for on in here), *(total * on for on in here), 0.0), False, 0.0))
    top = max(load.seconds(total) for load in pipelines) / unit
    problem = Integers(
        (*[0.0] * (2 * count), 1.0),
        (0.0,) * (2 * count + 1),
        (*[float(total)] * count, *[1.0] * count, top),
        (*[True] * (2 * count), False),
        tuple(rows),
    )
    counts = tuple(int(n) for n in solve(problem, solver)[:count])
    check_micro_batches(total, counts)
    return counts
