"""Integer programs handed to PuLP, and what is done when a solver is missing, broken or wrong (paper A.1).

Nothing a solver says is believed: its status is read, its numbers are rounded only if they are whole, and the caller
checks them again with plain arithmetic.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from hetero_megatron.errors import PlannerError

HIGHS, CBC, NONE = "highs", "cbc", "none"
SOLVERS = (HIGHS, CBC, NONE)
WHOLE = 1e-6
"""How far from a whole number a solver's answer may be."""

REMEDIES = {
    HIGHS: "pip install pulp highspy",
    CBC: "pip install pulp, which brings CBC for common machines",
}

Answer = TypeVar("Answer")
Row = tuple[tuple[float, ...], bool, float]
"""Coefficient per variable, whether the row is an equality, its bound."""


class SolverTrouble(Exception):
    """A solver that cannot be used or cannot be believed: which one, what is wrong, and the remedy."""

    def __init__(self, name: str, wrong: str, remedy: str = "") -> None:
        remedy = remedy or REMEDIES.get(name, "name one of " + ", ".join(SOLVERS))
        super().__init__(f"solver {name}: {wrong}; {remedy}")


class NoAnswer(Exception):
    """The solver says that the problem has no solution."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Which solver confirms a plan: `highs`, `cbc`, `none`, or the path of a CBC program; and its time limit."""

    name: str = HIGHS
    seconds: float = 10.0

    @property
    def is_path(self) -> bool:
        """Whether the name is that of a file."""
        return os.sep in self.name

    def __post_init__(self) -> None:
        if self.name not in SOLVERS and not self.is_path:
            raise PlannerError(
                f"solver {self.name!r} is unknown; name one of {', '.join(SOLVERS)}, or the path of a CBC program"
            )


@dataclass(frozen=True, slots=True)
class Integers:
    """min `objective` over variables in [lower, upper], whole where `whole` says so.

    Each row is `coefficients . variables >= bound`, or `== bound`.
    """

    objective: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    whole: tuple[bool, ...]
    rows: tuple[Row, ...]


def solve(problem: Integers, solver: Solver) -> tuple[float, ...]:
    """The variables of an optimal solution; whole ones are exact integers.

    Raises:
        SolverTrouble: the solver is missing or broken, ran out of time, or its answer is no solution.
        NoAnswer: there is no solution.
    """
    if solver.name == NONE:
        raise SolverTrouble(NONE, "switched off", "name highs to have plans confirmed")
    try:
        import pulp
    except ImportError as error:
        raise SolverTrouble(solver.name, f"PuLP is not installed ({error})", "pip install pulp") from error
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    with warnings.catch_warnings():
        # PuLP 3 announces another spelling for PuLP 4, which it does not have itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        variables = [
            pulp.LpVariable(f"x{n}", lo, hi, pulp.LpInteger if whole else pulp.LpContinuous)
            for n, (lo, hi, whole) in enumerate(zip(problem.lower, problem.upper, problem.whole, strict=True))
        ]
    model += pulp.lpSum(c * x for c, x in zip(problem.objective, variables, strict=True))
    for coefficients, equal, bound in problem.rows:
        left = pulp.lpSum(c * x for c, x in zip(coefficients, variables, strict=True) if c)
        model += (left == bound) if equal else (left >= bound)
    with warnings.catch_warnings():
        # As above; CBC is asked for by PuLP's older name.
        warnings.simplefilter("ignore", DeprecationWarning)
        status = _run(model, solver)
    if status == pulp.LpStatusInfeasible:
        raise NoAnswer
    # `Optimal` alone is not enough: some solvers say it of the best point found within their time limit.
    if status != pulp.LpStatusOptimal or model.sol_status != pulp.LpSolutionOptimal:
        told = f"{pulp.LpStatus[status]} ({pulp.LpSolution[model.sol_status]})"
        raise SolverTrouble(solver.name, f"stopped without an optimal solution: {told}", "allow it more time")
    return _checked(problem, [variable.value() for variable in variables], solver)


def _run(model: "pulp.LpProblem", solver: Solver) -> int:  # type: ignore[name-defined] # noqa: F821
    import pulp

    try:
        if solver.name == HIGHS:
            import highspy  # noqa: F401  # PuLP only says that HiGHS is not available

            program = pulp.HiGHS(msg=False, timeLimit=solver.seconds)
        elif solver.name == CBC:
            program = pulp.PULP_CBC_CMD(msg=False, timeLimit=solver.seconds)
        else:
            _check_program(solver.name)
            program = pulp.COIN_CMD(path=solver.name, msg=False, timeLimit=solver.seconds)
        if not program.available():
            raise SolverTrouble(solver.name, "is not installed or does not run here")
        with _quiet():
            status: int = model.solve(program)
        return status
    except SolverTrouble:
        raise
    # PuLP raises its own error, OSError and others, by solver and version.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SolverTrouble(solver.name, f"failed: {text}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints its banner to file descriptor 1, whatever it is told; JSON goes there too."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _check_program(path: str) -> None:
    if not os.path.isfile(path):
        raise SolverTrouble(path, "there is no such file", "give the path of a CBC program, or name highs")
    if not os.access(path, os.X_OK):
        raise SolverTrouble(path, "the file is not executable", f"chmod +x {path}")


def _checked(problem: Integers, values: Sequence[float | None], solver: Solver) -> tuple[float, ...]:
    """The values, whole where they have to be, if they are inside every bound and row."""
    found: list[float] = []
    for n, value in enumerate(values):
        if value is None:
            raise SolverTrouble(solver.name, f"left variable {n} without a value", "name another solver")
        if problem.whole[n] and abs(value - round(value)) > WHOLE:
            raise SolverTrouble(
                solver.name, f"gave {value} for a whole number (variable {n})", "name another solver"
            )
        value = round(value) if problem.whole[n] else value
        slack = WHOLE * max(1.0, abs(problem.upper[n]))
        if not problem.lower[n] - slack <= value <= problem.upper[n] + slack:
            raise SolverTrouble(
                solver.name,
                f"gave {value} for variable {n}, which is between {problem.lower[n]} and {problem.upper[n]}",
                "name another solver",
            )
        found.append(value)
    for number, (coefficients, equal, bound) in enumerate(problem.rows):
        left = sum(c * x for c, x in zip(coefficients, found, strict=True))
        slack = WHOLE * max(1.0, abs(bound), *(abs(c) for c in coefficients))
        if left < bound - slack or (equal and left > bound + slack):
            raise SolverTrouble(solver.name, f"broke row {number}: {left} for {bound}", "name another solver")
    return tuple(found)


def with_fallback(
    by_solver: Callable[[], Answer], by_search: Callable[[], Answer], value: Callable[[Answer], float]
) -> tuple[Answer, str]:
    """The solver's answer if it is at least as good as the own exact search's; and a sentence on who made it.

    A solver that is missing, broken, or worse than the search loses its word, and the sentence says so.
    """
    own = by_search()
    try:
        answer = by_solver()
    except SolverTrouble as trouble:
        return own, f"{trouble}. The own exact search made this plan."
    except NoAnswer:
        return own, "The solver calls a solved problem infeasible; the own exact search made this plan."
    if value(answer) > value(own) * (1 + WHOLE):
        return own, (
            f"The solver's answer ({value(answer):.6g}) is worse than the own exact search's ({value(own):.6g}), "
            "which made this plan."
        )
    return answer, ""
