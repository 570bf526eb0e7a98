"""Other systems' plans have their limits, and are never faster than ours where they are among its choices."""

from dataclasses import replace
from functools import lru_cache

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.baselines import LIMITS, baselines
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.hexiscale import BroadcastCosts, by_memory, dealings, hexiscale
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.lanes import Lanes
from hetero_megatron.planner.oobleck import mixtures, oobleck, template_seconds, templates
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.prices import Prices
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.realize import Priced
from hetero_megatron.planner.solver import Solver
from hetero_megatron.strategy import Stage

CONFIG = replace(PRESETS["llama_7b"], num_layers=12)


@lru_cache
def mixed() -> Plan:
    problem = Problem(CONFIG, Cluster.of_nodes({"h800": 1, "h20": 2}, per_node=4), 32, 2048)
    return make_plan(problem, Costs(CONFIG, problem.cluster, seq_length=2048), Solver("none"))


@lru_cache
def others() -> dict[str, Priced | None]:
    return baselines(mixed().problem, mixed().costs, mixed().homogeneous)


def test_every_baseline_fits_and_none_is_faster() -> None:
    plan = mixed()
    assert others().keys() == LIMITS.keys()
    for name, found in others().items():
        assert found is not None, name
        found.strategy.check(CONFIG.facts, plan.problem.cluster.ranks)
        assert found.seconds >= plan.best.seconds, name


def test_hexiscale_runs_gpipe_without_zero_and_its_scheduler_gives_layers_by_memory() -> None:
    found, problem = others()["hexiscale"], mixed().problem
    assert found is not None
    assert found.strategy.schedule == "gpipe"
    assert found.strategy.zero == 0
    kinds = {kind.name: kind.memory_bytes for kind in problem.cluster.kinds}
    for lanes in dealings(problem):
        for lane in lanes:
            memory = [block.ranks * kinds[block.kind] for block in lane]
            layers = by_memory(problem, lane)
            assert sum(layers) == CONFIG.num_layers
            spare = CONFIG.num_layers - len(lane)
            for count, own in zip(layers, memory, strict=True):
                assert abs(count - 1 - spare * own / sum(memory)) <= 1


def test_hexiscale_cuts_nodes_into_few_tuples_of_stages_and_uses_every_device() -> None:
    problem = Problem(CONFIG, Cluster.of_nodes({"h20": 2}), 32, 2048)
    assert {sum(b.ranks for lane in lanes for b in lane) for lanes in dealings(problem)} == {16}
    node = Problem(CONFIG, Cluster.of_nodes({"h20": 1}), 32, 2048)
    alone = {tuple(b.tp for b in lanes[0]) for lanes in dealings(node) if len(lanes) == 1}
    assert alone == {(8,), (4, 4), (4, 2, 2)}
    halves = {tuple(b.tp for b in lanes[0]) for lanes in dealings(node) if len(lanes) == 2}
    assert halves == {(4,), (2, 2), (2, 1, 1)}
    large = Problem(CONFIG, Cluster.of_nodes({"h20": 1}, per_node=12), 32, 2048)
    one = {tuple(block.tp for block in lanes[0]) for lanes in dealings(large) if len(lanes) == 1}
    assert one == {(8, 4), (8, 2, 2), (8, 2, 1, 1)}


def test_a_broadcast_of_whole_activations_takes_longer_than_parts() -> None:
    plan = mixed()
    sender, receiver = Stage((0, 1, 2, 3), (0, 5), 4), Stage((4, 5, 6, 7), (6, 11), 4)
    parts, whole = (
        costs.boundary(sender, receiver, 2048) for costs in (plan.costs, BroadcastCosts.like(plan.costs))
    )
    assert whole > 1.5 * parts
    lone = Stage((0,), (0, 5)), Stage((4,), (6, 11))
    assert BroadcastCosts.like(plan.costs).boundary(*lone, 2048) == plan.costs.boundary(*lone, 2048)


def test_oobleck_uses_whole_nodes_only_and_needs_two_pipelines() -> None:
    plan = mixed()
    lost = replace(plan.problem, cluster=plan.problem.cluster.without([0]))
    found = oobleck(lost, plan.costs)
    assert found is not None
    assert set(found.strategy.ranks) == set(range(4, 12)), "the node that lost a device is left out"
    assert found.strategy.idle_ranks == (1, 2, 3)
    assert len(found.strategy.pipelines) >= 2
    assert found.strategy.zero == 0
    assert oobleck(replace(lost, cluster=lost.cluster.without([4])), plan.costs) is None
    for pipeline in found.strategy.pipelines:
        for stage in pipeline.stages:
            assert len({lost.cluster.node_of(rank) for rank in stage.ranks}) == 1


def test_oobleck_has_a_template_for_every_number_of_nodes_and_mixtures_that_cover_them() -> None:
    problem = Problem(CONFIG, Cluster.of_nodes({"h20": 5}, per_node=4), 32, 2048)
    lanes = Lanes(Prices(problem, Costs(CONFIG, problem.cluster, seq_length=2048)))
    made = templates(problem, lanes, "h20", 1, 5, 4, 1)
    assert [each.nodes for each in made] == [1, 2, 3, 4]
    for each in made:
        assert sum(block.ranks for block in each.lane.blocks) == 4 * each.nodes
        assert sum(each.lane.layers) == CONFIG.num_layers
    found = [tuple(each.nodes for each in own) for own in mixtures(made, 5, 2)]
    assert sorted(found) == [(1, 1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2), (4, 1)]
    many = [tuple(each.nodes for each in own) for own in mixtures(made, 40, 2)]
    assert {sum(own) for own in many} == {40}
    assert all(max(own) - min(own) <= 1 for own in many)
    assert min(map(len, many)) == 10


@pytest.mark.parametrize(
    ("stages", "micro_batches", "seconds"),
    [([3.0], 4, 3 + 3 * 3 + 3), ([1.0, 2.0, 1.0], 12, 27.0), ([2.0, 2.0], 8, 4 + 7 * 2 + 2)],
)
def test_a_templates_seconds_are_those_of_the_published_equations(
    stages: list[float], micro_batches: int, seconds: float
) -> None:
    assert template_seconds(stages, micro_batches) == seconds


def test_hotspa_on_rows_of_one_length_is_homogeneous_without_context_parallelism() -> None:
    assert others()["hotspa"] is others()["homogeneous"]
    problem = Problem(CONFIG, Cluster.of_nodes({"h20": 1}), 2, 32768, Choices(context_parallel=(1, 2, 4)))
    costs = Costs(CONFIG, problem.cluster, seq_length=32768)
    found, even = baselines(problem, costs)["hotspa"], homogeneous(problem, costs)
    assert found is not None
    assert even is not None
    assert even.seconds <= found.seconds
    assert all(stage.cp == 1 for pipeline in found.strategy.pipelines for stage in pipeline.stages)


def test_where_nothing_homogeneous_fits_there_is_none() -> None:
    problem = Problem(PRESETS["llama_70b"], Cluster.of_nodes({"h20": 1}), 8, 4096)
    costs = Costs(problem.config, problem.cluster)
    assert homogeneous(problem, costs) is None
    assert hexiscale(problem, costs) is None
    assert set(baselines(problem, costs).values()) == {None}
