"""What a strategy may be, and how each fault in a hand-written one is named (cases O-01 to O-03, O-08)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.errors import StrategyError
from hetero_megatron.models.presets import LLAMA_32B, LLAMA_70B
from hetero_megatron.pipeline.schedule import interleaved
from hetero_megatron.strategy import ModelFacts, Pipeline, Stage, Strategy
from tests.distributed.training import T0, het4, stage, strategy

FACTS = T0.facts


def refused(plan: Strategy, ranks: int = 4, facts: ModelFacts = FACTS) -> str:
    """The message with which `plan` is refused on this many ranks."""
    with pytest.raises(StrategyError) as caught:
        plan.check(facts, range(ranks))
    return str(caught.value)


def two_stages(first: str, second: str) -> Strategy:
    return strategy((2, 1, [stage("0", first), stage("1", second)]))


def changed(facts: ModelFacts = FACTS, **options: Any) -> ModelFacts:
    return replace(facts, **options)


# Layers: every one exactly once per pipeline, in order.


def test_an_explicit_split_of_seven_layers_over_three_stages_is_whole() -> None:
    plan = strategy((1, 1, [stage("0", "0-2"), stage("1", "3-4"), stage("2", "5-6")]))
    plan.check(changed(num_layers=7), range(3))
    counts = [len(each.layer_numbers) for each in plan.pipelines[0].stages]
    assert counts == [3, 2, 2]
    assert [n for each in plan.pipelines[0].stages for n in each.layer_numbers] == list(range(7))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0-1", "1-3", "pipeline 0: layer 1 is doubled: in stage 0 and in stage 1"),
        ("0-0", "2-3", "pipeline 0: layer 1 is missing (layers [1] are in no stage of pipeline 0)"),
        ("0-1", "2-4", "pipeline 0 stage 1: layer 4 is beyond the model, which has layers 0-3"),
        ("2-3", "0-1", "pipeline 0 stage 1: layer 0 is out of order: stage 0 already ends at 3"),
    ],
    ids=["doubled", "missing", "beyond the model", "out of order"],
)
def test_a_layer_fault_names_the_layer_and_its_pipeline(first: str, second: str, message: str) -> None:
    two_stages("0-1", "2-3").check(FACTS, range(2))
    assert refused(two_stages(first, second), ranks=2) == message


def test_a_layer_missing_in_the_second_pipeline_only_is_found_there() -> None:
    plan = strategy((1, 1, [stage("0-1", "0-2"), stage("2", "3")]), (1, 1, [stage("3", "0-2")]))
    assert refused(plan) == "pipeline 1: layer 3 is missing (layers [3] are in no stage of pipeline 1)"


@pytest.mark.parametrize("layers", [(3, 0), (-1, 3)])
def test_layers_are_written_from_first_to_last(layers: tuple[int, int]) -> None:
    plan = strategy((1, 1, [Stage((0,), layers)]))
    assert refused(plan, ranks=1) == (
        f"pipeline 0 stage 0: layers {layers[0]}-{layers[1]} are out of order: write first-last, from 0"
    )


def test_an_empty_stage_is_allowed_at_the_ends_only() -> None:
    at_both_ends = [stage("0", None), stage("1", "0-3"), stage("2", None)]
    strategy((1, 1, at_both_ends)).check(FACTS, range(3))
    inside = [stage("0", "0-1"), stage("1", None), stage("2", "2-3")]
    assert refused(strategy((1, 1, inside)), ranks=3) == (
        "pipeline 0 stage 1 is an empty stage between others: only the first or last may hold no layer"
    )
    assert "pipeline 0: layer 0 is missing" in refused(strategy((1, 1, [stage("0", None)])), ranks=1)


# Ranks: each at most once, all of them known, and none forgotten.


def with_first(*stages: Stage) -> Strategy:
    """HET4 with other stages in pipeline 0."""
    return strategy((3, 1, stages), (1, 1, [stage("3", "0-3")]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            with_first(stage("0-1", "0-2"), stage("1", "3")),
            "rank 1 is used twice: in pipeline 0 stage 0 and in pipeline 0 stage 1",
        ),
        (
            strategy((3, 1, [stage("0-1", "0-2"), stage("2", "3")]), (1, 1, [stage("2", "0-3")])),
            "rank 2 is used twice: in pipeline 0 stage 1 and in pipeline 1 stage 0",
        ),
        (
            with_first(Stage((0, 1, 0, 1), (0, 2)), stage("2", "3")),
            "rank 0 is used twice: in pipeline 0 stage 0 and in pipeline 0 stage 0",
        ),
        (
            with_first(stage("0-1", "0-2"), stage("7", "3")),
            "rank 7 of pipeline 0 stage 1 is not in the cluster, which has 4 ranks (0 to 3)",
        ),
        (
            strategy((3, 1, [stage("0-1", "0-2"), stage("2", "3")])),
            "rank 3 is in no pipeline (left over: [3]); use it, or list it under strategy.idle_ranks",
        ),
        (
            with_first(stage("0", "0-2", tp=2), stage("2", "3")),
            "pipeline 0 stage 0: tp 2 x cp 1 needs 2 ranks, but rank list [0] has 1",
        ),
    ],
    ids=["two stages", "two pipelines", "one stage", "unknown", "left over", "TP2 on one rank"],
)
def test_a_rank_fault_names_the_rank_and_its_places(plan: Strategy, message: str) -> None:
    het4().check(FACTS, range(4))
    assert refused(plan) == message


def test_idle_ranks_are_named_and_really_idle() -> None:
    plan = strategy((3, 1, [stage("0-1", "0-2"), stage("2", "3")]), idle_ranks=(3,))
    plan.check(FACTS, range(4))
    assert plan.ranks == (0, 1, 2)
    assert refused(replace(plan, idle_ranks=(2, 3))) == (
        "rank 2 is listed in idle_ranks and used in pipeline 0 stage 1"
    )
    assert refused(replace(plan, idle_ranks=(3, 7))) == (
        "rank 7 of idle_ranks is not in the cluster, which has 4 ranks (0 to 3)"
    )


# What a strategy itself cannot be.


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (strategy(), "the strategy has no pipeline"),
        (replace(het4(), zero=2), "zero is 2; 0 keeps optimizer states whole, 1 shards them"),
        (replace(het4(), context_parallel="rong"), "context_parallel is 'rong'; known: ring, ulysses"),
        (
            strategy((-1, 1, [stage("0", "0-3")])),
            "pipeline 0: -1 micro-batches of size 1; the count must be 0 or more",
        ),
        (
            strategy((1, 0, [stage("0", "0-3")])),
            "pipeline 0: 1 micro-batches of size 0; .* the size 1 or more",
        ),
        (strategy((1, 1, [])), "pipeline 0 has no stage"),
        (strategy((1, 1, [Stage((), (0, 3))])), "pipeline 0 stage 0 has no rank"),
        (
            strategy((1, 1, [Stage((0, 1, 2), (0, 3), tp=(2, 1))]), context_parallel="ulysses"),
            r"pipeline 0 stage 0: context_parallel ulysses needs the same TP in every part, tp is \[2, 1\]; "
            "context_parallel ring takes parts of different TP",
        ),
        (
            strategy((1, 1, [Stage(tuple(range(8)), (0, 3), cp=2)]), context_parallel="ulysses"),
            "stage 0: context_parallel ulysses splits 4 attention heads over tp 4 x cp 2 = 8 ranks, which must "
            "divide them; context_parallel ring has no such limit",
        ),
        (
            strategy((1, 1, [Stage((0,), (0, 3), cp=0)])),
            "stage 0: cp 0; it counts context-parallel parts",
        ),
        (
            strategy((1, 1, [stage("0-1", "0-3", tp=1)])),
            r"tp 1 x cp 1 needs 1 ranks, but rank list \[0, 1\] has 2",
        ),
    ],
)
def test_what_is_no_strategy_is_refused(plan: Strategy, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        plan.check(FACTS, plan.ranks or (0,))


@pytest.mark.parametrize(
    ("facts", "ranks", "message"),
    [
        (
            FACTS,
            "0-2",
            "pipeline 0 stage 0: 4 attention heads (2 kv heads) cannot be split over TP 3; TP must divide 4",
        ),
        (
            changed(num_attention_heads=12, num_query_groups=4),
            "0-5",
            "pipeline 0 stage 0: 4 kv heads cannot be split or copied over TP 6; "
            "one of the two must divide the other",
        ),
        (changed(ffn_hidden_size=3), "0-3", "pipeline 0 stage 0: ffn_hidden_size 3 is smaller than TP 4"),
        (changed(vocab_size=2), "0-3", "pipeline 0 stage 0: vocab_size 2 is smaller than TP 4"),
    ],
    ids=["heads", "kv heads", "ffn", "vocabulary"],
)
def test_a_degree_that_the_sizes_do_not_allow_is_refused(facts: ModelFacts, ranks: str, message: str) -> None:
    assert refused(strategy((1, 1, [stage(ranks, "0-3")])), ranks=6, facts=facts) == message


def test_kv_heads_may_be_copied_over_more_ranks() -> None:
    strategy((1, 1, [stage("0-3", "0-3")])).check(FACTS, range(4))


def test_a_stage_without_tp_is_one_tensor_parallel_group() -> None:
    assert [stage("0-3", "0-3").tensor_parallel_size, stage("0-3", "0-3", 4).tensor_parallel_size] == [4, 4]
    assert list(stage("0", None).layer_numbers) == []


# Irregular plans from the paper are accepted as written.


def spans(first: int, sizes: Sequence[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(f"{first}-{first + size - 1}")
        first += size
    return found


def c2(*depths: int) -> Strategy:
    """31 ranks: four stages of TP4 beside TP 4, 4, 4, 2, 1 with these numbers of layers."""
    even = [stage(*both) for both in zip(spans(0, [4] * 4), spans(0, [15] * 4), strict=True)]
    uneven = [stage(*both) for both in zip(spans(16, [4, 4, 4, 2, 1]), spans(0, depths), strict=True)]
    return strategy((33, 1, even), (31, 1, uneven))


def test_the_layout_of_c2_is_accepted_as_the_paper_writes_it() -> None:
    plan = c2(16, 16, 16, 8, 4)
    plan.check(LLAMA_32B.facts, range(31))
    assert len(plan.ranks) == len(set(plan.ranks)) == 31
    for pipeline in plan.pipelines:
        assert [n for each in pipeline.stages for n in each.layer_numbers] == list(range(60))
    assert plan.rows_per_step == 64
    assert [s.tensor_parallel_size for s in plan.pipelines[1].stages] == [4, 4, 4, 2, 1]


def test_c2_with_one_layer_less_is_refused() -> None:
    assert refused(c2(16, 16, 16, 8, 3), ranks=31, facts=LLAMA_32B.facts) == (
        "pipeline 1: layer 59 is missing (layers [59] are in no stage of pipeline 1)"
    )


def test_three_very_uneven_stages_of_80_layers_are_accepted() -> None:
    stages = [stage(*both) for both in zip(spans(0, [8] * 3), spans(0, [17, 17, 46]), strict=True)]
    plan = Strategy((Pipeline(8, 1, tuple(stages)),))
    plan.check(LLAMA_70B.facts, range(24))
    assert [len(each.layer_numbers) for each in plan.pipelines[0].stages] == [17, 17, 46]


# Interleaved pipelines: several layer ranges per stage, and the schedule that runs them.


PP2_V2 = [stage("0", "0,2"), stage("1", "1,3")]


def test_interleaved_pipelines_may_differ_in_depth_and_chunks_and_stand_beside_one_stage() -> None:
    facts = changed(num_layers=6)
    plan = strategy(
        (4, 1, [stage("0", "0, 2, 4"), stage("1", "1, 3, 5")]),
        (3, 1, [stage("2", "0, 3"), stage("3", "1, 4"), stage("4", "2, 5")]),
        (2, 1, [stage("5", "0-5")]),
        schedule="interleaved",
    )
    plan.check(facts, range(6))
    assert [pipeline.chunks for pipeline in plan.pipelines] == [3, 2, 1]


@pytest.mark.parametrize(
    ("stages", "schedule", "message"),
    [
        (
            PP2_V2,
            "1f1b",
            "pipeline 0 has 2 layer ranges on each stage, which schedule 1f1b cannot run; use schedule",
        ),
        (
            PP2_V2,
            "gpipe",
            "which schedule gpipe cannot run; use schedule interleaved, or give each stage one range",
        ),
        (
            [stage("0", "0-1"), stage("1", "2-3")],
            "interleaved",
            "pipeline 0 has one layer range on each of 2 stages; .* with one range use schedule 1f1b",
        ),
        (
            [stage("0", "0-3")],
            "interleaved",
            "schedule interleaved: every pipeline has one stage, .* use schedule 1f1b",
        ),
        (
            [stage("0", "0-1,2-3")],
            "interleaved",
            "pipeline 0 has 2 layer ranges on its only stage; .* as one range",
        ),
        (PP2_V2, "interleave", "schedule 'interleave' is unknown; did you mean 'interleaved'"),
        (
            [stage("0", "0,2"), stage("1", "1-1")],
            "interleaved",
            "pipeline 0 stage 1: 1 layer ranges, another stage of pipeline 0 has 2; an interleaved pipeline has as",
        ),
        (
            [stage("0", "0,2"), stage("1", "1,3"), stage("2", None)],
            "interleaved",
            "pipeline 0 stage 2 holds no layer: an interleaved pipeline needs 2 ranges",
        ),
        (
            [stage("0", "0,3"), stage("1", "1,2")],
            "interleaved",
            "pipeline 0 stage 1: layer 2 is out of order: stage 0 already ends at 3",
        ),
    ],
)
def test_layer_ranges_that_the_schedule_cannot_run_are_refused(
    stages: Sequence[Stage], schedule: str, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        strategy((2, 1, stages), schedule=schedule).check(FACTS, range(len(stages)))


def test_given_tasks_fit_the_stages_micro_batches_and_chunks() -> None:
    plan = strategy((2, 1, PP2_V2), (0, 1, [stage("2", "0,2"), stage("3", "1,3")]), schedule="mine.csv")
    fitting = replace(plan, schedule_tasks=(interleaved(2, 2, 2), interleaved(2, 0, 2)))
    fitting.check(FACTS, range(4))
    for tasks, message in [
        ((interleaved(2, 2, 2),), "schedule mine.csv has 1 pipelines, the strategy has 2"),
        (
            (interleaved(3, 2, 2), interleaved(2, 0, 2)),
            "schedule mine.csv: pipeline 0 has 3 stages there and 2 in the strategy; change one of the two",
        ),
        ((interleaved(2, 3, 2), interleaved(2, 0, 2)), "pipeline 0 has 3 micro-batches there and 2 in the"),
        (
            (interleaved(2, 2, 3), interleaved(2, 0, 2)),
            "pipeline 0 has 3 chunks per stage there and 2 in the",
        ),
        ((interleaved(2, 2, 2), interleaved(2, 1, 2)), "pipeline 1 has 1 micro-batches there and 0 in the"),
    ]:
        with pytest.raises(StrategyError, match=message):
            replace(plan, schedule_tasks=tasks).check(FACTS, range(4))
