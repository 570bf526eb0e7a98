"""Small problems: the plan is as fast as the fastest of all strategies."""

from math import inf

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.plan import make_plan
from hetero_megatron.planner.solver import Solver
from tests.planner.enumeration import Enumeration
from tests.planner.small import small_costs, small_problem
from tests.whole import all_are_asked_for

CASES = 200
QUICK = (5, 6, 9, 10, 16, 19, 22, 23, 25, 29, 32, 35, 37, 39, 51, 53, 61, 64, 69, 70)


def agrees(seed: int) -> None:
    problem = small_problem(seed)
    try:
        plan = make_plan(problem, small_costs(problem), Solver("none"))
    except PlannerError:
        assert Enumeration(problem).best(first=True) == inf, f"seed {seed}: some strategy fits"
        return
    plan.strategy.check(problem.config.facts, problem.cluster.ranks)
    assert (
        sum(p.micro_batches * p.micro_batch_size for p in plan.strategy.pipelines)
        == problem.global_batch_size
    )
    assert plan.bound_seconds <= plan.best.seconds
    best = Enumeration(problem, plan.best.seconds * (1 - 1e-9)).best()
    assert best == inf, f"seed {seed}: {best} beats {plan.best.seconds}"


@pytest.mark.parametrize("seed", QUICK)
def test_the_plan_is_the_fastest_strategy_there_is(seed: int) -> None:
    agrees(seed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cases under `pytest -m fuzz`, none otherwise."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", range(CASES if all_are_asked_for(metafunc.config) else 0))


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_the_plan_is_the_fastest_strategy_there_is_in_200_cases(case: int) -> None:
    agrees(case)
