"""The whole pure walk: places, groups and schedules of a strategy, without any process."""

import time
from dataclasses import replace

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import ScheduleError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.llama import Llama
from hetero_megatron.models.presets import LLAMA_32B
from hetero_megatron.pipeline.action import spell_steps
from hetero_megatron.pipeline.schedule_file import read_csv
from hetero_megatron.program import Program, split_groups
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, build, het4, stage, strategy


def program(plan: Strategy) -> Program:
    return build(Llama(T0), plan)


def test_every_rank_has_its_place() -> None:
    found = program(het4())
    assert found.pipelines == (((0, 1), (2,)), ((3,),))
    assert [found.pipeline_of(rank) for rank in range(4)] == [(0, (0, 1, 2))] * 3 + [(1, (3,))]
    assert [found.stage_of(rank) for rank in range(4)] == [0, 0, 1, 0]
    assert [found.reports_loss(rank) for rank in range(4)] == [False, False, True, True]


def test_one_rank_of_a_last_stage_reports_the_loss() -> None:
    found = program(strategy((1, 1, [stage("0", "0-1"), stage("1-2", "2-3")])))
    assert [found.reports_loss(rank) for rank in range(3)] == [False, True, False]


def test_a_rank_that_works_nowhere_is_refused() -> None:
    plan = strategy((1, 1, [stage("0", "0-3")]), idle_ranks=(1,))
    with pytest.raises(StrategyError, match="rank 1 works in no pipeline of this strategy"):
        program(plan).pipeline_of(1)


def test_a_fault_is_found_before_any_process() -> None:
    with pytest.raises(StrategyError, match="pipeline 0: layer 3 is missing"):
        program(strategy((1, 1, [stage("0", "0-2")])))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_groups_of_het4_are_those_found_by_hand(sequence_parallel: bool) -> None:
    found = program(het4(sequence_parallel=sequence_parallel))
    # TP of stage 0; then, to add gradients, each half of layers 0-2 with rank 3, and layer 3 and the head.
    assert found.groups == ((0, 1), (0, 3), (1, 3), (2, 3))
    assert found.control_groups == ((0, 1, 2), (3,))


def test_the_vocabulary_split_of_the_last_stage_needs_a_group_of_its_own_ranks() -> None:
    found = program(strategy((1, 1, [stage("0", "0-3"), stage("1-2", None)]), sequence_parallel=False))
    assert (1, 2) in found.groups
    logits = next(node for node in found.annotated.graph.nodes if node.signature and node.signature.reduced)
    assert split_groups(found.annotated.values[logits.inputs[0]], 1) == [(1, 2)]


def test_tokens_must_divide_over_all_stages_of_their_own_pipeline() -> None:
    wide = strategy(
        (1, 1, [stage("0-3", "0-1"), stage("4-5", "2-3")]),
        (1, 1, [stage("6-7", "0-3")]),
        (1, 1, [stage("8", "0-3")]),
    )
    assert [program(wide).token_multiple(pipeline) for pipeline in range(3)] == [4, 2, 1]
    whole = program(replace(wide, sequence_parallel=False))
    assert [whole.token_multiple(pipeline) for pipeline in range(3)] == [1, 1, 1]


def test_context_parallel_parts_pad_their_own_tokens_and_report_their_own_loss() -> None:
    found = program(strategy((1, 1, [stage("0-2", "0-1", tp=(2, 1)), stage("3-8", "2-3", tp=(4, 2))])))
    assert [found.token_multiple(0, part) for part in (0, 1)] == [4, 2]
    assert found.token_multiple(0) == 1, "a whole micro-batch is not padded"
    assert [found.part_of(rank) for rank in range(9)] == [0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert [rank for rank in range(9) if found.reports_loss(rank)] == [3, 7]


def test_ulysses_has_a_group_of_one_rank_per_part() -> None:
    plan = strategy((1, 1, [stage("0-3", "0-3", cp=2)]), (1, 1, [stage("4", "0-3")]))
    ring, ulysses = program(plan), program(replace(plan, context_parallel="ulysses"))
    assert [ring.lane_of(rank) for rank in (1, 4)] == [(), ()]
    assert [ulysses.lane_of(rank) for rank in range(5)] == [(0, 2), (1, 3), (0, 2), (1, 3), ()]
    assert {(0, 2), (1, 3)} <= set(ulysses.groups)


def test_a_step_may_have_other_counts_of_micro_batches_than_the_strategy() -> None:
    found = program(het4())
    assert spell_steps(found.actions(2, 1)) == "{RECV_F0} F0 B0 {SEND_B0}"
    assert spell_steps(found.actions(3, 2)) == "F0 B0 F1 B1"
    assert found.actions(0, 0) == ()
    assert spell_steps(found.actions(0, 3)) == spell_steps(found.schedule.steps(0, 0))


def c2() -> Strategy:
    even = [stage(f"{4 * s}-{4 * s + 3}", f"{15 * s}-{15 * s + 14}") for s in range(4)]
    uneven = [
        stage("16-19", "0-15"),
        stage("20-23", "16-31"),
        stage("24-27", "32-47"),
        stage("28-29", "48-55"),
        stage("30", "56-59"),
    ]
    return strategy((33, 1, even), (31, 1, uneven), idle_ranks=(31,))


def test_c2_at_full_size_walks_through_and_says_31_ranks_60_layers_64_sequences() -> None:
    graph = trace(Llama(LLAMA_32B))
    began = time.perf_counter()
    found = Program.build(graph, c2(), LLAMA_32B.facts, Cluster.of_nodes({"h20": 4}))
    assert time.perf_counter() - began < 10
    places = [rank for pipeline in found.pipelines for each in pipeline for rank in each]
    assert sorted(places) == list(range(31))
    entries = [name for name in graph.reshards if name.endswith(".entry")]
    assert len(entries) == 60
    for number in (0, 1):
        holders = [found.plan[name].groups[number].ranks for name in entries]
        assert sorted(set(holders)) == sorted(found.pipelines[number])
    assert found.strategy.rows_per_step == 64
    assert [actions.micro_batches for actions in found.schedule.pipelines] == [33, 31]
    # Layer 48 on: two ranks beside four; each half is added with the two quarters that lie in it.
    assert {(12, 28), (13, 28), (14, 29), (15, 29)} <= set(found.groups)


def test_moving_one_layer_out_of_c2_is_refused() -> None:
    plan = c2()
    second = plan.pipelines[1]
    shorter = replace(second, stages=(*second.stages[:-1], stage("30", "56-58")))
    with pytest.raises(StrategyError, match="pipeline 1: layer 59 is missing"):
        Program.build(
            trace(Llama(LLAMA_32B)),
            replace(plan, pipelines=(plan.pipelines[0], shorter)),
            LLAMA_32B.facts,
            Cluster.of_nodes({"h20": 4}),
        )


INTERLEAVED = strategy(
    (3, 1, [stage("0", "0, 2"), stage("1", "1, 3")]), (1, 1, [stage("2", "0-3")]), schedule="interleaved"
)


def test_a_rank_of_an_interleaved_pipeline_has_a_chunk_for_each_of_its_turns() -> None:
    found = program(INTERLEAVED)
    assert found.pipelines == (((0,), (1,)), ((2,),))
    chunks = [found.executable(rank).chunks for rank in range(3)]
    assert [[(chunk.inputs, chunk.outputs) for chunk in own] for own in chunks] == [
        [((), ("layers.1.entry",)), (("layers.2.entry",), ("layers.3.entry",))],
        [(("layers.1.entry",), ("layers.2.entry",)), (("layers.3.entry",), ())],
        [((), ())],
    ]
    assert spell_steps(found.actions(0, 1)) == (
        "F0 {SEND_F0} {RECV_F0.1} F0.1 {SEND_F0.1} {RECV_B0.1} B0.1 {SEND_B0.1} {RECV_B0} B0"
    )
    assert spell_steps(found.actions(2, 2)) == "F0 B0 F1 B1"


def test_a_given_order_is_followed_and_is_for_its_own_count_only() -> None:
    tasks = read_csv("pipeline,stage,actions\n0,0,F0,F1,B1,B0\n", "mine.csv")
    plan = strategy((2, 1, [stage("0", "0-3")]), schedule="mine.csv", schedule_tasks=tasks)
    found = program(plan)
    assert spell_steps(found.actions(0, 2)) == "F0 F1 B1 B0"
    with pytest.raises(
        ScheduleError,
        match="schedule mine.csv: pipeline 0 runs 2 micro-batches there, and 3 in this step; a sched",
    ):
        found.actions(0, 3)
