"""Small problems: the plan is as fast as the fastest of all strategies."""

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.plan import make_plan
from hetero_megatron.planner.solver import Solver
from tests.planner.small import Enumeration, small_costs, small_problem

CASES = 200
QUICK = (0, 1, 4, 7, 9, 17, 26, 36, 45, 51, 110, 162)


def agrees(seed: int) -> None:
    problem = small_problem(seed)
    try:
        plan = make_plan(problem, small_costs(problem), Solver("none"))
    except PlannerError:
        if len(problem.cluster.devices) <= 4 and problem.config.num_layers <= 8:
            assert Enumeration(problem, 1e9).best() == 1e9, f"seed {seed}: some strategy fits"
        return
    plan.strategy.check(problem.config.facts, problem.cluster.ranks)
    assert (
        sum(p.micro_batches * p.micro_batch_size for p in plan.strategy.pipelines)
        == problem.global_batch_size
    )
    best = Enumeration(problem, plan.best.seconds).best()
    assert best >= plan.best.seconds * (1 - 1e-9), f"seed {seed}: {best} beats {plan.best.seconds}"
    assert plan.bound_seconds <= plan.best.seconds


@pytest.mark.parametrize("seed", QUICK)
def test_the_plan_is_the_fastest_strategy_there_is(seed: int) -> None:
    agrees(seed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cases under `pytest -m fuzz`, none otherwise."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", range(CASES if "fuzz" in metafunc.config.option.markexpr else 0))


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_the_plan_is_the_fastest_strategy_there_is_in_200_cases(case: int) -> None:
    agrees(case)
