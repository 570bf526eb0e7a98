"""Other systems' plans have their limits, and are never faster than ours where they are among its choices."""

from dataclasses import replace
from functools import lru_cache

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.baselines import baselines, hexiscale, hotspa, oobleck
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.solver import Solver

CONFIG = replace(PRESETS["llama_7b"], num_layers=12)


@lru_cache
def mixed() -> Plan:
    problem = Problem(CONFIG, Cluster.of_nodes({"h800": 1, "h20": 2}, per_node=4), 32, 2048)
    return make_plan(problem, Costs(CONFIG, problem.cluster, seq_length=2048), Solver("none"))


def test_every_baseline_fits_and_none_is_faster() -> None:
    plan = mixed()
    for name, found in baselines(plan.problem, plan.costs).items():
        assert found is not None, name
        found.strategy.check(CONFIG.facts, plan.problem.cluster.ranks)
        assert found.seconds >= plan.best.seconds, name


def test_hexiscale_gives_layers_by_memory_and_runs_gpipe() -> None:
    plan = mixed()
    made = list(hexiscale(plan.problem, plan.costs))
    assert {strategy.schedule for strategy in made} == {"gpipe"}
    assert {strategy.zero for strategy in made} == {0}
    kinds = {kind.name: kind.memory_bytes for kind in plan.problem.cluster.kinds}
    for strategy in made:
        for pipeline in strategy.pipelines:
            memory = [
                len(s.ranks) * kinds[plan.problem.cluster.kind(s.ranks[0]).name] for s in pipeline.stages
            ]
            for stage, own in zip(pipeline.stages, memory, strict=True):
                assert len(stage.ranks) in (1, 2, 4, 8)
                spare = CONFIG.num_layers - len(memory)
                assert abs(len(stage.layer_numbers) - 1 - spare * own / sum(memory)) <= 1


def test_oobleck_uses_whole_nodes_only() -> None:
    plan = mixed()
    lost = replace(plan.problem, cluster=plan.problem.cluster.without([0]))
    for strategy in oobleck(lost):
        assert set(strategy.ranks).isdisjoint(range(4)), "the node that lost a device is left out"
        assert strategy.idle_ranks == (1, 2, 3)
        for pipeline in strategy.pipelines:
            assert len({len(stage.ranks) for stage in pipeline.stages}) == 1


def test_hotspa_gives_each_bucket_of_lengths_a_homogeneous_strategy() -> None:
    plan = mixed()
    found = hotspa(
        plan.problem,
        lambda own: Costs(CONFIG, own.cluster, seq_length=own.seq_length),
        {2048: 16, 8192: 4},
    )
    assert found is not None
    seconds, by_length = found
    assert list(by_length) == [2048, 8192]
    assert seconds == pytest.approx(sum(each.seconds for each in by_length.values()))
    short = homogeneous(
        replace(plan.problem, global_batch_size=16), Costs(CONFIG, plan.problem.cluster, seq_length=2048)
    )
    assert short is not None
    assert by_length[2048].seconds == short.seconds


def test_where_nothing_homogeneous_fits_there_is_none() -> None:
    problem = Problem(PRESETS["llama_70b"], Cluster.of_nodes({"h20": 1}), 8, 4096)
    costs = Costs(problem.config, problem.cluster)
    assert homogeneous(problem, costs) is None
    assert baselines(problem, costs) == {"homogeneous": None, "hexiscale": None, "oobleck": None}
    assert hotspa(problem, lambda own: costs, {4096: 8}) is None
