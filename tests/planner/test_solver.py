"""Solvers that are missing, broken or wrong lose their word, and say why; the own search takes over."""

import stat
import sys
from pathlib import Path

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.plan import make_plan
from hetero_megatron.planner.solver import (
    Integers,
    NoAnswer,
    Solver,
    SolverTrouble,
    _checked,
    solve,
    with_fallback,
)
from tests.planner.small import small_costs, small_problem

# x + y >= 3.5, both whole: 4.
WHOLE = Integers((1.0, 1.0), (0.0, 0.0), (5.0, 5.0), (True, True), (((1.0, 1.0), False, 3.5),))
SEED = 4


def planned(solver: Solver):  # type: ignore[no-untyped-def]
    problem = small_problem(SEED)
    plan = make_plan(problem, small_costs(problem), solver)
    plan.strategy.check(problem.config.facts, problem.cluster.ranks)
    return plan


@pytest.mark.parametrize("name", ["highs", "cbc"])
def test_both_solvers_give_whole_numbers(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert sum(solve(WHOLE, Solver(name))) == 4
    assert capfd.readouterr().out == "", "a solver's banner would spoil --json"


def test_what_has_no_solution_is_said_to_have_none() -> None:
    problem = Integers((1.0,), (0.0,), (5.0,), (True,), (((1.0,), False, 6.0),))
    with pytest.raises(NoAnswer):
        solve(problem, Solver())


def test_a_plan_is_confirmed_by_the_solver_that_is_there() -> None:
    plan = planned(Solver())
    assert "confirmed by highs" in plan.method
    assert not any("solver" in note for note in plan.notes)


def test_a_path_that_points_nowhere_is_named_and_the_plan_stands(tmp_path: Path) -> None:
    plan = planned(Solver(str(tmp_path / "cbc")))
    assert any("there is no such file; give the path of a CBC program" in note for note in plan.notes)
    assert any("The own exact search made this plan" in note for note in plan.notes)
    assert "confirmed" not in plan.method
    assert plan.strategy == planned(Solver()).strategy


def test_a_file_that_is_not_executable_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "cbc"
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(stat.S_IRUSR)
    plan = planned(Solver(str(path)))
    # Root may read and write anything, but executes only what has the bit.
    assert any(f"the file is not executable; chmod +x {path}" in note for note in plan.notes)


def test_a_program_for_another_machine_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cbc"
    path.write_bytes(b"\x7fELF nothing that runs")
    path.chmod(0o755)
    plan = planned(Solver(str(path)))
    assert any(f"solver {path}: failed" in note for note in plan.notes)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    plan = planned(Solver())
    assert any("PuLP is not installed" in note and "pip install pulp" in note for note in plan.notes)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "highspy", None)
    notes = planned(Solver()).notes
    assert any("solver highs: " in note and "pip install pulp highspy" in note for note in notes), notes


def test_a_temporary_folder_that_cannot_be_written_leaves_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    plan = planned(Solver("cbc"))
    assert "confirmed by cbc" in plan.method or any("solver cbc: " in note for note in plan.notes)
    assert plan.strategy == planned(Solver("none")).strategy


def test_without_a_solver_the_plan_is_the_same() -> None:
    plan = planned(Solver("none"))
    assert plan.strategy == planned(Solver()).strategy
    assert not any("solver" in note for note in plan.notes)
    assert "confirmed" not in plan.method


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(PlannerError, match="solver 'gurobi' is unknown; name one of highs, cbc, none"):
        Solver("gurobi")
    with pytest.raises(SolverTrouble, match="switched off; name highs to have plans confirmed"):
        solve(WHOLE, Solver("none"))


def test_time_that_is_up_is_no_answer() -> None:
    with pytest.raises(SolverTrouble, match="stopped without an optimal solution|failed"):
        solve(_hard(), Solver("highs", seconds=1e-9))


def _hard() -> Integers:
    count = 60
    weights = tuple(float((37 * n) % 101 + 50) for n in range(count))
    rows = tuple(
        (tuple(weights[(n * k + 3) % count] for n in range(count)), True, 9999.0) for k in range(1, 6)
    )
    return Integers(weights, (0.0,) * count, (9.0,) * count, (True,) * count, rows)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([None, 4.0], "left variable 0 without a value"),
        ([1.5, 2.5], "gave 1.5 for a whole number"),
        ([6.0, 0.0], "gave 6 for variable 0, which is between 0.0 and 5.0"),
        ([1.0, 1.0], "broke row 0: 2.0 for 3.5"),
    ],
)
def test_answers_that_are_no_solutions_are_not_believed(values: list[float | None], told: str) -> None:
    with pytest.raises(SolverTrouble, match=told):
        _checked(WHOLE, values, Solver())


def test_a_worse_answer_and_a_denied_one_lose_to_the_own_search() -> None:
    answer, note = with_fallback(lambda: 5.0, lambda: 4.0, lambda each: each)
    assert answer == 4.0
    assert "The solver's answer (5) is worse than the own exact search's (4)" in note

    def denies() -> float:
        raise NoAnswer

    answer, note = with_fallback(denies, lambda: 4.0, lambda each: each)
    assert answer == 4.0
    assert "calls a solved problem infeasible" in note
