"""Plans for the paper's clusters: they fit, and are never slower than the paper's own under the same cost model."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.config import LlamaConfig, count_parameters
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.exact import is_small
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.lanes import Lanes, Setting
from hetero_megatron.planner.level_two import split_layers
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Block, Choices, Problem
from hetero_megatron.planner.realize import polish, price
from hetero_megatron.planner.reasons import why_slower
from hetero_megatron.planner.solver import Solver
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Stage, Strategy

PAPER = Path(__file__).parent.parent.parent / "recipes" / "paper"
TABLE9 = sorted(path.stem for path in PAPER.glob("table9_*.yaml"))
TABLES_11_12 = [f"c{n}" for n in range(1, 8)]
TABLES_15_16 = ["table15_a", "table15_b", "table16_a", "table16_b"]
SMALL = LlamaConfig(
    num_layers=6,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=512,
)


@lru_cache
def stated(name: str) -> tuple[Strategy, Problem, Costs]:
    """The paper's strategy, and its problem on the devices that work in the strategy's table."""
    recipe = load_recipe(PAPER / f"{name}.yaml")
    given, cluster = recipe.make_strategy(), recipe.make_cluster()
    if given.idle_ranks:
        cluster = cluster.without(given.idle_ranks)
        given = replace(given, idle_ranks=())
    problem = Problem(
        recipe.make_config(),
        cluster,
        recipe.training.global_batch_size,
        recipe.training.seq_length,
        Choices(zero=(given.zero,)),
    )
    return given, problem, Costs(problem.config, cluster, seq_length=problem.seq_length)


@lru_cache
def planned(name: str) -> tuple[Plan, Strategy, float]:
    """The plan, the paper's strategy and its seconds."""
    given, problem, costs = stated(name)
    return make_plan(problem, costs, Solver("none")), given, costs.step(given).seconds


@pytest.mark.parametrize("name", [*TABLE9, *TABLES_11_12, *TABLES_15_16])
def test_the_plan_fits_and_is_never_slower_than_the_papers_own(name: str) -> None:
    plan, given, seconds = planned(name)
    problem = plan.problem
    plan.strategy.check(problem.config.facts, problem.cluster.ranks)
    given.check(problem.config.facts, problem.cluster.ranks)
    assert plan.best.seconds <= seconds
    assert plan.bound_seconds <= plan.best.seconds
    assert (
        sum(p.micro_batches * p.micro_batch_size for p in plan.strategy.pipelines)
        == problem.global_batch_size
    )
    for rank, need in plan.best.memory_bytes.items():
        assert need <= problem.cluster.kind(rank).memory_bytes
    assert plan.homogeneous is not None
    assert plan.best.seconds <= plan.homogeneous.seconds


def test_stages_stay_inside_nodes() -> None:
    plan, _, _ = planned("table9_32b_16h800_32h20")
    for pipeline in plan.strategy.pipelines:
        for stage in pipeline.stages:
            assert len({plan.problem.cluster.node_of(rank) for rank in stage.ranks}) == 1


@pytest.mark.parametrize("name", [*TABLE9, *TABLES_11_12])
def test_on_the_papers_pipelines_level_two_gives_every_stage_the_papers_layers_or_one_more_or_less(
    name: str,
) -> None:
    """Stages of one kind and degree may change places.

    C2's are those of layers alone: its last stage is one H20, where the head takes as long as 2.4 layers on four.
    """
    given, problem, costs = stated(name)
    lanes = Lanes(Prices(problem, costs), quick=False)
    for pipeline in given.pipelines:
        blocks = tuple(
            Block(problem.cluster.kind(stage.ranks[0]).name, len(stage.ranks)) for stage in pipeline.stages
        )
        setting = Setting(pipeline.micro_batch_size, len(given.pipelines), given.zero)
        # C7's own layers need more memory than there is by our account: no limit here.
        loads = [load.free for load in lanes.loads(blocks, setting, pipeline.micro_batches, "none")]
        if name == "c2":
            loads = [replace(load, fixed=0.0) for load in loads]
        layers = split_layers(problem.config.num_layers, loads, pipeline.micro_batches)
        assert layers is not None
        own = [len(stage.layer_numbers) for stage in pipeline.stages]
        for block in set(blocks):
            one = sorted(n for n, b in zip(layers, blocks, strict=True) if b == block)
            other = sorted(n for n, b in zip(own, blocks, strict=True) if b == block)
            assert all(abs(a - b) <= 1 for a, b in zip(one, other, strict=True)), (layers, own)


def test_the_same_problem_gives_the_same_plan() -> None:
    plan, _, _ = planned("c3")
    again = make_plan(plan.problem, Costs(plan.problem.config, plan.problem.cluster), Solver("none"))
    assert again.strategy == plan.strategy
    assert again.best.seconds == plan.best.seconds


def test_a_runner_up_has_another_shape_and_a_reason() -> None:
    plan, _, _ = planned("table9_32b_16h800_32h20")
    assert plan.runner_up is not None
    assert plan.runner_up.seconds >= plan.best.seconds
    assert "% longer: " in why_slower(plan.runner_up, plan.best)


def test_devices_that_are_left_over_are_named() -> None:
    # Three devices of which tensor parallelism can use one or two.
    cluster = Cluster(tuple(Device(rank, "h20", 0) for rank in range(3)), _kinds(2**34))
    plan = make_plan(Problem(SMALL, cluster, 1, 256), Costs(SMALL, cluster, seq_length=256), Solver("none"))
    assert len(plan.strategy.ranks) + len(plan.strategy.idle_ranks) == 3
    assert plan.strategy.idle_ranks
    assert any("idle: using them makes no step shorter" in note for note in plan.notes)


def _kinds(memory: int, flops: float = 148e12) -> tuple[DeviceKind, ...]:
    return (DeviceKind("h20", memory, flops, Link("nvlink", 900.0)),)


# The model of the shared cases, of 8 layers: 80,416 parameters.
T0 = LlamaConfig(
    num_layers=8,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=96,
)


def test_a_model_that_no_memory_holds_is_refused_with_both_numbers() -> None:
    assert count_parameters(T0) == 80_416
    cluster = _four(200_000)
    costs = Costs(T0, cluster, seq_length=16, precision="fp32")
    with pytest.raises(PlannerError, match="need at least 1286656 bytes, and 4 devices have 800000"):
        make_plan(Problem(T0, cluster, 4, 16), costs, Solver("none"))


def test_7_layers_on_2_devices_of_3_each_are_refused_with_both_counts() -> None:
    config = replace(SMALL, num_layers=7)
    kinds = _kinds(2**31)
    cluster = Cluster((Device(0, "h20", 0), Device(1, "h20", 1)), kinds)
    problem = Problem(config, cluster, 2, 256, Choices(recompute=(), zero=(0,), tensor_parallel=(1,)))
    load = Lanes(Prices(problem, Costs(config, cluster, seq_length=256))).loads(
        (Block("h20", 1), Block("h20", 1)), Setting(1, 1, 0), 2, "none"
    )[0]
    # Room for three layers and what comes with them, not for four.
    memory = int(2**31 - load.room_bytes + 3.5 * load.layer_bytes)
    tight = Cluster(cluster.devices, _kinds(memory))
    with pytest.raises(PlannerError, match=r"the devices hold \d of 7 layers at once") as refused:
        make_plan(replace(problem, cluster=tight), Costs(config, tight, seq_length=256), Solver("none"))
    assert "add devices" in str(refused.value)


def test_a_slow_device_with_enough_memory_is_planned() -> None:
    kinds = (*_kinds(2**34), DeviceKind("h800", 2**34, 1e9, Link("nvlink", 400.0)))
    cluster = Cluster((Device(0, "h20", 0), Device(1, "h800", 1)), kinds)
    plan = make_plan(Problem(SMALL, cluster, 4, 256), Costs(SMALL, cluster, seq_length=256), Solver("none"))
    assert plan.strategy.ranks == (0,)
    assert plan.strategy.idle_ranks == (1,)


def test_stages_of_1_2_2_3_layers_are_judged_by_their_heaviest() -> None:
    """The average, 20,104 parameters, is what an estimate for even stages would take every stage for."""
    ends = (0, 1, 3, 5, 8)
    stages = tuple(Stage((n,), (a, b - 1)) for n, (a, b) in enumerate(pairwise(ends)))
    eight, two = (Strategy((Pipeline(count, 1, stages),)) for count in (8, 2))
    cluster = _four(2**34)
    costs = Costs(T0, cluster, seq_length=16, precision="fp32")
    parameters = costs.parameters(eight)
    assert parameters == {0: 12_352, 1: 18_560, 2: 18_560, 3: 30_944}
    assert sum(parameters.values()) == count_parameters(T0) == 80_416 == 4 * 20_104
    states = 16  # bytes: parameter, gradient, two moments, all in FP32
    held = {
        count: [parts.in_flight for parts in costs.footprint.per_rank(plan).values()]
        for count, plan in ((8, eight), (2, two))
    }
    assert held == {8: [(4,), (3,), (2,), (1,)], 2: [(2,), (2,), (2,), (1,)]}
    for plan, counts in ((eight, (4, 3, 2, 1)), (two, (2, 2, 2, 1))):
        kept = [parts.weights[0] for parts in costs.footprint.per_rank(plan).values()]
        assert costs.activation_bytes(plan) == {n: counts[n] * kept[n] for n in range(4)}
    assert costs.activation_bytes(eight)[0] == 2 * costs.activation_bytes(two)[0]
    for limit in (20_104 * states, 25_000 * states, 30_943 * states):
        assert price(eight, _four(limit), costs) is None, "between the average and the heaviest is not enough"
    needed = max(costs.memory(eight).values())
    assert needed >= 30_944 * states
    assert price(eight, _four(needed), costs) is not None


def _four(memory: int) -> Cluster:
    return Cluster(tuple(Device(rank, "h20", 0) for rank in range(4)), _kinds(memory))


def test_polishing_never_makes_a_step_longer() -> None:
    plan, given, seconds = planned("c2")
    start = price(given, plan.problem.cluster, plan.costs)
    assert start is not None
    better = polish(start, plan.problem.cluster, plan.costs)
    assert better.seconds < seconds
    better.strategy.check(plan.problem.config.facts, plan.problem.cluster.ranks)


def test_small_problems_are_solved_exactly_and_large_ones_are_not() -> None:
    cluster = Cluster(tuple(Device(rank, "h20", 0) for rank in range(3)), _kinds(2**34))
    problem = Problem(SMALL, cluster, 3, 256)
    assert is_small(problem)
    assert make_plan(problem, Costs(SMALL, cluster, seq_length=256), Solver("none")).optimal
    assert not is_small(replace(problem, global_batch_size=64))


def test_the_homogeneous_strategy_is_even() -> None:
    plan, _, _ = planned("c1")
    even = homogeneous(plan.problem, plan.costs)
    assert even is not None
    shapes = {
        (p.micro_batches, tuple((s.tensor_parallel_sizes, len(s.layer_numbers)) for s in p.stages))
        for p in even.strategy.pipelines
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_number_of_pipelines_that_is_asked_for_is_kept(number: int) -> None:
    cluster = Cluster(tuple(Device(rank, "h20", 0) for rank in range(4)), _kinds(2**34))
    problem = Problem(SMALL, cluster, 6, 256, Choices(pipelines=(number,)))
    plan = make_plan(problem, Costs(SMALL, cluster, seq_length=256), Solver("none"))
    assert len(plan.strategy.pipelines) == number
