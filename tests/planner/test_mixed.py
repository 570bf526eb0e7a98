"""Strategies for mixed lengths at full size: feasible, quick, better than what others do (paper §9 c, Figure 17)."""

import time
from functools import cache

import numpy as np
import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.presets import LLAMA_7B, LLAMA_32B
from hetero_megatron.planner.chooser import StepChooser
from hetero_megatron.planner.hotspa import HOTSPA, Buckets, plan_buckets
from hetero_megatron.planner.layouts import Layout, Layouts
from hetero_megatron.planner.length_sample import LengthSample
from hetero_megatron.planner.mixed import MixedPlan, plan_mixed
from hetero_megatron.planner.mixed_baselines import (
    PAPER,
    best_windows,
    fitting,
    homogeneous,
    paper_strategies,
    window_step,
    windows,
)
from hetero_megatron.planner.mixed_floor import floor_seconds
from hetero_megatron.planner.small_batches import SmallBatchCosts
from hetero_megatron.recipe import load_recipe
from tests.planner.lengths import wikipedia_like

TOKENS = 200_000


@cache
def costs_of(context: int) -> SmallBatchCosts:
    return SmallBatchCosts(LLAMA_32B, Cluster.of_nodes({"h20": 4}), None, context, "bf16")


@cache
def planned(context: int) -> tuple[MixedPlan, float]:
    began = time.process_time()
    plan = plan_mixed(costs_of(context), wikipedia_like(), TOKENS)
    return plan, time.process_time() - began


@pytest.mark.parametrize("context", [16384, 32768])
def test_the_plan_is_feasible_quick_and_better_than_the_four_others(context: int) -> None:
    plan, seconds = planned(context)
    costs, layouts = costs_of(context), Layouts(costs_of(context), context)
    assert seconds < 10
    for each in plan.strategies:
        strategy = each.named.strategy
        strategy.check(LLAMA_32B.facts, costs.cluster.ranks)
        assert strategy.zero == 1
        assert max(costs.memory(strategy).values()) <= costs.cluster.kind(0).memory_bytes
    assert plan.strategies[0].named.max_length is None
    steps = LengthSample.draw(wikipedia_like(), context, TOKENS, 6, 77).steps
    lengths = [step.tolist() for step in steps]
    began = time.process_time()
    choices = StepChooser(plan.named, costs).choose_many(lengths)
    assert (time.process_time() - began) / len(steps) < 0.3
    ours = np.mean([each.total_seconds for each in choices])
    packed = best_windows(layouts, steps, False).seconds
    varlen = best_windows(layouts, steps, True).seconds
    table14, planned_buckets = Buckets(layouts, HOTSPA[context]), plan_buckets(layouts, steps[:3])
    hotspa = min(table14.mean(steps), planned_buckets.mean(steps))
    assert planned_buckets.mean(steps) < table14.mean(steps)
    paper = StepChooser(paper_strategies(layouts, steps), costs).choose_many(lengths)
    assert ours < min(packed, varlen, hotspa, np.mean([each.total_seconds for each in paper]))
    assert varlen < packed
    floor = np.array(floor_seconds(layouts, steps))
    assert (floor < [each.candidate.seconds for each in choices]).all()
    assert ours < 1.12 * floor.mean()


def test_the_same_plan_comes_out_again() -> None:
    """On one node, where a plan is quick."""

    def plan() -> MixedPlan:
        costs = SmallBatchCosts(LLAMA_7B, Cluster.of_nodes({"h20": 1}), None, 16384, "bf16")
        return plan_mixed(costs, wikipedia_like(), 65536)

    assert plan().strategies == plan().strategies


@pytest.mark.parametrize("context", [16384, 32768])
def test_the_papers_compositions_are_those_of_the_shipped_recipes(context: int) -> None:
    table = "15" if context == 32768 else "16"
    for name, _, composition in PAPER[context]:
        given = load_recipe(f"recipes/paper/table{table}_{name.lower()}.yaml").make_strategy()
        layouts = Layouts(costs_of(context), context)
        ranks, built = layouts.ranks, []
        for layout, count in composition:
            for _ in range(count):
                built.append(layouts.pipeline(layout, ranks))
                ranks = ranks[layout.devices :]
        assert [p.stages for p in built] == [p.stages for p in given.pipelines]


def test_the_best_homogeneous_strategies_recompute_as_little_as_memory_allows() -> None:
    found = [layout for layout, _ in homogeneous(Layouts(costs_of(16384), 16384))]
    assert Layout(8, 1, 1) in found
    assert len({(each.tp, each.cp, each.pp) for each in found}) == len(found)


def test_hotspas_intervals_are_homogeneous_without_context_parallelism_and_pay_for_switches() -> None:
    layouts = Layouts(costs_of(16384), 16384)
    buckets = Buckets(layouts, HOTSPA[16384], switch_seconds=3.0)
    assert str(buckets) == "4096: DP4 TP4 PP2, 16384: DP2 TP8 PP2"
    assert buckets.seconds([100, 5000])[1] == 6.0
    assert buckets.seconds([100, 300])[1] == buckets.seconds([5000])[1] == 0.0
    dear = plan_buckets(layouts, [np.array([100] * 40 + [5000, 12000])], switch_seconds=1e6)
    assert dear.ends == [16384]
    assert all(layout.cp == 1 for _, layout, _ in dear.buckets)


def test_windows_hold_documents_uncut_and_long_ones_are_refused() -> None:
    assert windows([3, 9, 5, 1, 2], 10) == [(9, 1), (5, 3, 2)]
    with pytest.raises(
        PlannerError, match="a document of 11 tokens is longer than a window of 10; cut it first"
    ):
        windows([11], 10)


def test_attention_over_the_window_costs_more_than_inside_documents() -> None:
    layouts = Layouts(costs_of(16384), 16384)
    strategy = dict(homogeneous(layouts))[Layout(8, 1, 1)]
    packed = windows([4096] * 32, 16384)
    assert window_step(layouts.costs, strategy, packed, False) > 1.05 * window_step(
        layouts.costs, strategy, packed, True
    )


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    layouts = Layouts(costs_of(16384), 16384)
    with pytest.raises(PlannerError, match="32 x TP1 for 16384 tokens do not fit into the devices' memory"):
        fitting(layouts, [(Layout(1, 1, 1), 32, 16384)])
    small = SmallBatchCosts(LLAMA_32B, Cluster.of_nodes({"h20": 1}), None, 16384, "bf16")
    with pytest.raises(
        PlannerError, match=r"the paper has strategies for contexts \[16384, 32768\] on 32 devices, none"
    ):
        paper_strategies(Layouts(small, 16384), [])
    tiny = SmallBatchCosts(LLAMA_32B, Cluster.of_nodes({"v100-16": 1}), None, 16384, "bf16")
    with pytest.raises(
        PlannerError, match="no strategy of 8 v100-16 devices holds a document of 16384 tokens; use more"
    ):
        plan_mixed(tiny, wikipedia_like(), TOKENS)
    with pytest.raises(
        PlannerError, match="no homogeneous strategy on 8 devices holds 16384 tokens per micro-batch"
    ):
        homogeneous(Layouts(tiny, 16384))
    with pytest.raises(
        PlannerError,
        match="HotSPa's buckets: no homogeneous strategy of DP, TP and PP on 8 devices holds a document",
    ):
        plan_buckets(Layouts(tiny, 16384), [])
