"""SCIP's first level: as fast as every arrangement of a few devices, and missed without harm where it is missing."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.level_two import closed_form, split_layers
from hetero_megatron.planner.minlp import ends, solve_minlp
from hetero_megatron.planner.plan import make_plan
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.solver import Solver, SolverTrouble

CONFIG = LlamaConfig(
    num_layers=5,
    hidden_size=1024,
    ffn_hidden_size=2048,
    num_attention_heads=4,
    num_query_groups=4,
    vocab_size=512,
)
KINDS = (
    DeviceKind("h800", 2**36, 400e12, Link("nvlink", 400.0)),
    DeviceKind("h20", 2**36, 148e12, Link("nvlink", 900.0)),
)


def problem_of(fast: int, slow: int, batch: int) -> Problem:
    devices = [Device(rank, "h800", 0) for rank in range(fast)]
    devices += [Device(fast + rank, "h20", 1) for rank in range(slow)]
    kinds = KINDS if fast else KINDS[1:]
    choices = Choices(micro_batch_sizes=(1,), zero=(0,), recompute=())
    return Problem(CONFIG, Cluster(tuple(devices), kinds), batch, 1024, choices)


def lanes(problem: Problem, lane: Blocks = ()) -> Iterator[Blocks]:
    for own in problem.blocks.values():
        for block in own:
            found = (*lane, block)
            if len(found) <= 3 and problem.supply.holds(found):
                yield found
                yield from lanes(problem, found)


def enumerated(prices: Prices) -> float:
    """The least over one and two pipelines of up to three stages, under the closed form."""
    problem, total = prices.problem, prices.problem.global_batch_size
    known: dict[tuple[Blocks, int], float] = {}

    def seconds(lane: Blocks, count: int) -> float:
        if (lane, count) not in known:
            loads = ends(prices, lane, 1)
            layers = split_layers(CONFIG.num_layers, loads, count)
            assert layers is not None
            known[lane, count] = closed_form(loads, layers, count)
        return known[lane, count]

    every = list(lanes(problem))
    best = min(seconds(lane, total) for lane in every)
    for n, one in enumerate(every):
        for other in every[n:]:
            if problem.supply.holds((*one, *other)):
                for count in range(1, total):
                    best = min(best, max(seconds(one, count), seconds(other, total - count)))
    return best


@pytest.mark.parametrize(("fast", "slow", "batch"), [(1, 1, 4), (2, 1, 5), (0, 3, 4), (1, 2, 6)])
def test_scip_is_as_good_as_every_arrangement(fast: int, slow: int, batch: int) -> None:
    pytest.importorskip("pyscipopt")
    prices = Prices(
        problem_of(fast, slow, batch), Costs(CONFIG, problem_of(fast, slow, batch).cluster, seq_length=1024)
    )
    value, sketch, layers, counts = solve_minlp(prices, 1, 0, 2, 3)
    assert value == pytest.approx(enumerated(prices), rel=1e-4)
    assert sum(counts) == batch
    assert all(sum(own) == CONFIG.num_layers for own in layers)
    assert prices.problem.supply.holds(sketch.blocks)


def test_a_plan_may_start_from_what_scip_proposes() -> None:
    pytest.importorskip("pyscipopt")
    problem = problem_of(1, 2, 6)
    costs = Costs(CONFIG, problem.cluster, seq_length=1024)
    plan = make_plan(problem, costs, Solver("none"), minlp=True)
    assert plan.best.seconds == make_plan(problem, costs, Solver("none")).best.seconds
    assert not any("scip" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("package", "told"), [("pyomo.environ", "Pyomo is not installed"), ("pyscipopt", "solver scip: ")]
)
def test_a_missing_package_is_named_and_the_own_search_plans(
    package: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    problem = problem_of(1, 1, 4)
    plan = make_plan(problem, Costs(CONFIG, problem.cluster, seq_length=1024), Solver("none"), minlp=True)
    notes = [note for note in plan.notes if told in note]
    assert notes
    assert "pip install pyomo pyscipopt" in notes[0]
    assert "The own search made this plan" in notes[0]


def test_many_devices_are_left_to_the_search() -> None:
    problem = replace(problem_of(0, 4, 4), cluster=Cluster.of_nodes({"h20": 2}))
    plan = make_plan(problem, Costs(CONFIG, problem.cluster, seq_length=1024), Solver("none"), minlp=True)
    assert any("The MINLP is for up to 8 devices, and there are 16" in note for note in plan.notes)


def test_time_that_is_up_is_no_proposal() -> None:
    pytest.importorskip("pyscipopt")
    problem = problem_of(2, 2, 8)
    prices = Prices(problem, Costs(CONFIG, problem.cluster, seq_length=1024))
    with pytest.raises(SolverTrouble, match="solver scip: "):
        solve_minlp(prices, 1, 0, 3, 3, seconds=0.0)
