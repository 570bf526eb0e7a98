"""Plans after ranks are lost or join: what is left is used, no layer is lost, the batch stays (paper Tables 11, 12)."""

from dataclasses import replace
from functools import lru_cache

import pytest

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.errors import ClusterError, PlannerError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.churn_plans import renamed
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.movement import movement
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.replan import replan
from hetero_megatron.planner.solver import Solver
from hetero_megatron.planner.survival import fragile, lost_layers, lost_states, survives
from hetero_megatron.strategy import Pipeline, Stage, Strategy

CONFIG = PRESETS["llama_32b"]


@lru_cache
def c1(zero: int = 0, pipelines: int = 2) -> Plan:
    """32B on 32 H20 in two pipelines."""
    cluster = Cluster.of_nodes({"h20": 4})
    problem = Problem(CONFIG, cluster, 64, 4096, Choices(zero=(zero,), pipelines=(pipelines,)))
    return make_plan(problem, Costs(CONFIG, cluster), Solver("none"))


@lru_cache
def c4() -> Plan:
    """32B on 16 H800 and 32 H20 in two pipelines."""
    cluster = Cluster.of_nodes({"h800": 2, "h20": 4})
    problem = Problem(CONFIG, cluster, 64, 4096, Choices(zero=(0,), pipelines=(2,)))
    return make_plan(problem, Costs(CONFIG, cluster), Solver("none"))


# The paper's own strategies of Table 11 and 12: C2 after C1 lost rank 31; C5 after C4 lost ranks 40-47.
C2 = Strategy(
    (
        Pipeline(
            33, 1, tuple(Stage(tuple(range(4 * n, 4 * n + 4)), (15 * n, 15 * n + 14)) for n in range(4))
        ),
        Pipeline(
            31,
            1,
            (
                Stage((16, 17, 18, 19), (0, 15)),
                Stage((20, 21, 22, 23), (16, 31)),
                Stage((24, 25, 26, 27), (32, 47)),
                Stage((28, 29), (48, 55)),
                Stage((30,), (56, 59)),
            ),
        ),
    )
)


@pytest.mark.parametrize("lost", [(31,), (0,), (12, 13), (24, 25, 26, 27, 28, 29, 30, 31)])
def test_what_is_left_trains_on_with_the_same_batch(lost: tuple[int, ...]) -> None:
    plan = c1()
    found = replan(plan, lost)
    left = plan.problem.cluster.without(lost)
    found.best.strategy.check(CONFIG.facts, left.ranks)
    assert sum(p.micro_batches * p.micro_batch_size for p in found.best.strategy.pipelines) == 64
    assert found.lost == lost
    assert found.lost_states == ()
    assert len(found.best.strategy.pipelines) > 1, "a plan that could lose a rank stays one that can"
    for rank, need in found.best.memory_bytes.items():
        assert need <= left.kind(rank).memory_bytes


def test_losing_rank_31_is_answered_no_worse_than_in_the_paper() -> None:
    plan = c1()
    assert replan(plan, (31,)).best.seconds <= plan.costs.step(C2).seconds


@pytest.mark.parametrize("lost", [(15,), (40, 41, 42, 43, 44, 45, 46, 47), (8, 9, 10, 11, 12, 13, 14, 15)])
def test_mixed_clusters_are_planned_on(lost: tuple[int, ...]) -> None:
    plan = c4()
    found = replan(plan, lost)
    found.best.strategy.check(CONFIG.facts, plan.problem.cluster.without(lost).ranks)
    assert found.best.seconds >= plan.best.seconds * 0.99
    assert found.best.seconds < plan.best.seconds * 2


def test_a_plan_of_several_pipelines_without_zero_outlives_every_node() -> None:
    plan = c4()
    cluster = plan.problem.cluster
    for node in {device.node for device in cluster.devices}:
        own = [device.rank for device in cluster.devices if device.node == node]
        assert lost_layers(plan.strategy, CONFIG.num_layers, own) == ()


def test_it_is_much_faster_than_planning_anew() -> None:
    """At most 0.2 s on an idle machine; here, a share of what planning takes."""
    plan = c4()
    replan(plan, (15,))
    assert replan(plan, (14,)).seconds < max(0.2, plan.seconds)


def test_ranks_that_lost_nothing_keep_most_of_what_they_have() -> None:
    plan = c1()
    found = replan(plan, (31,))
    everything = movement(Strategy(()), found.best.strategy, plan.problem.cluster, plan.costs)
    assert 0 < found.moved_bytes < everything.bytes / 2
    assert found.switch_seconds > 0


def test_the_time_of_a_switch_counts_more_the_sooner_the_next_change_comes() -> None:
    plan = c4()
    soon, late = (replan(plan, (15,), horizon_seconds=h) for h in (5.0, 1e6))
    assert soon.switch_seconds <= late.switch_seconds
    assert soon.best.seconds >= late.best.seconds


def test_zero_1_says_which_states_come_from_a_checkpoint() -> None:
    plan = c1(1)
    assert plan.strategy.zero == 1
    found = replan(plan, (31,))
    own = next(s for p in plan.strategy.pipelines for s in p.stages if 31 in s.ranks).layer_numbers
    assert found.lost_states == ((own[0], own[-1]),)
    assert any("come from a checkpoint" in note for note in found.notes)


def test_layers_without_a_survivor_are_refused() -> None:
    plan = c1()
    stages = [p.stages[0].ranks for p in plan.strategy.pipelines]
    lost = (stages[0][0], stages[1][0])
    with pytest.raises(PlannerError, match=r"no survivor has layers 0-\d+: start from a checkpoint"):
        replan(plan, lost)


def test_what_does_not_fit_any_more_is_refused() -> None:
    plan = c1()
    # Eight copies, so that one of them is left: on four devices, where no plan has the memory.
    stages = [Stage(tuple(range(4 * n, 4 * n + 4)), (0, 59)) for n in range(8)]
    running = Strategy(tuple(Pipeline(8, 1, (stage,)) for stage in stages))
    with pytest.raises(PlannerError, match=r"after losing ranks 0-27: no plan fits: .* 4 devices have \d+"):
        replan(plan, range(28), running=running)


def test_ranks_outside_the_cluster_are_refused() -> None:
    with pytest.raises(ClusterError, match="rank 99 is not in the cluster"):
        replan(c1(), (99,))


SMALL = LlamaConfig(
    num_layers=6,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=512,
)


def test_devices_that_join_are_put_to_work() -> None:
    kinds = (DeviceKind("h20", 2**34, 148e12, Link("nvlink", 900.0)),)
    cluster = Cluster(tuple(Device(rank, "h20", 0) for rank in range(2)), kinds)
    problem = Problem(replace(SMALL, hidden_size=2048), cluster, 12, 1024, Choices(zero=(0,)))
    plan = make_plan(problem, Costs(problem.config, cluster, seq_length=1024), Solver("none"))
    found = replan(plan, joined=tuple(Device(rank, "h20", 1) for rank in (2, 3)))
    assert found.joined == (2, 3)
    assert set(found.best.strategy.ranks) & {2, 3}
    assert found.best.seconds < plan.best.seconds


# Survival

TWO = Strategy(
    (
        Pipeline(1, 1, (Stage((0, 1), (0, 2)), Stage((2,), (3, 5)))),
        Pipeline(1, 1, (Stage((3,), (0, 3)), Stage((4, 5), (4, 5)))),
    )
)


def test_shares_of_tensor_parallel_ranks_are_looked_at_one_by_one() -> None:
    assert survives(TWO, 6, (0,))
    assert survives(TWO, 6, (0, 1))
    assert lost_layers(TWO, 6, (0, 3)) == (0, 1, 2)
    assert lost_layers(TWO, 6, (2, 3)) == (3,)
    assert lost_layers(TWO, 6, (2, 5)) == (4, 5)
    assert survives(TWO, 6, (0, 4))


def test_pairs_that_are_fatal_together() -> None:
    pairs = fragile(TWO, 6)
    assert set(pairs) == {(0, 3), (1, 3), (2, 3), (2, 4), (2, 5)}
    every = [(a, b) for a in range(6) for b in range(a + 1, 6) if not survives(TWO, 6, (a, b))]
    assert list(pairs) == every


def test_under_zero_1_every_loss_takes_states_along() -> None:
    assert lost_states(replace(TWO, zero=1), 6, (2,)) == (3, 4, 5)
    assert lost_states(TWO, 6, (2,)) == ()
    assert not survives(replace(TWO, zero=1), 6, (2,))
    assert fragile(replace(TWO, zero=1), 6) == ()


def test_nothing_moves_between_equal_strategies_and_whole_layers_move_to_new_ranks() -> None:
    kinds = (DeviceKind("h20", 2**34, 148e12, Link("nvlink", 900.0)),)
    cluster = Cluster(tuple(Device(rank, "h20", rank // 3) for rank in range(6)), kinds)
    costs = Costs(SMALL, cluster)
    assert movement(TWO, TWO, cluster, costs).bytes == 0
    swapped = Strategy((TWO.pipelines[0], Pipeline(1, 1, (Stage((4, 5), (0, 3)), Stage((3,), (4, 5))))))
    moved = movement(TWO, swapped, cluster, costs)
    # Ranks 4 and 5 get halves of layers 0-3, rank 3 gets layers 4 and 5.
    assert moved.bytes == 6 * costs.work.layer_parameters * 12
    assert moved.seconds > 0


def test_all_devices_of_a_kind_may_be_lost() -> None:
    """Drafts of the first plan name a kind that is not there any more."""
    plan = c4()
    running = renamed(c1().strategy, {rank: rank + 16 for rank in range(32)})
    found = replan(plan, range(16), running=running)
    assert {plan.problem.cluster.kind(rank).name for rank in found.best.strategy.ranks} == {"h20"}
