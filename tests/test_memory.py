"""The memory of every rank at full size, from annotations, shapes and the schedule."""

from dataclasses import replace
from functools import lru_cache

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.nodes import Kind, Node
from hetero_megatron.graph.trace import trace
from hetero_megatron.memory import RankMemory, estimate, most_in_flight, tokens_of
from hetero_megatron.models.config import LlamaConfig, count_parameters
from hetero_megatron.models.llama import Llama
from hetero_megatron.models.presets import LLAMA_32B, LLAMA_70B
from hetero_megatron.pipeline.action import parse_steps
from hetero_megatron.program import Program
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy
from tests.cli.commands import C1, C2

BF16 = 2


@lru_cache(maxsize=4)
def graph(config: LlamaConfig) -> object:
    return trace(Llama(config))


def needs(
    plan: Strategy, config: LlamaConfig = LLAMA_32B, seq_length: int = 4096, item: int = BF16
) -> dict[int, RankMemory]:
    cluster = Cluster.of_nodes({"h20": 4}) if config is not LLAMA_70B else Cluster.of_nodes({"h20": 1})
    program = Program.build(graph(config), plan, config.facts, cluster)  # type: ignore[arg-type]
    return {each.rank: each for each in estimate(program, seq_length, item)}


def recipe(path: str) -> Strategy:
    return load_recipe(path).make_strategy()


def changed(plan: Strategy, **options: object) -> Strategy:
    """`plan` with other options on every stage."""

    def pipeline(each: Pipeline) -> Pipeline:
        return replace(each, stages=tuple(replace(stage, **options) for stage in each.stages))  # type: ignore[arg-type]

    return replace(plan, pipelines=tuple(map(pipeline, plan.pipelines)))


def test_a_layer_keeps_what_the_formula_says() -> None:
    """C1: TP4 with sequence parallelism, two rows of 4096 tokens, as many key/value heads as query heads."""
    found = needs(recipe(C1))[4].by_layer
    tokens, hidden, ffn, heads, tp = 8192, 6656, 17920, 64, 4
    layer = 2 * (2 * tokens * hidden // tp + 4 * tokens // tp)
    layer += 2 * 2 * tokens * hidden
    layer += 2 * tokens * 4 * hidden // tp + 4 * tokens * heads // tp
    layer += 4 * 2 * tokens * ffn // tp
    angles = 2 * tokens * (104 + 52)
    assert found == {15: layer + angles, **dict.fromkeys(range(16, 30), layer)}


def test_recomputation_leaves_out_what_the_formula_says() -> None:
    kept = {
        kind: needs(changed(recipe(C1), recompute=(Recompute(kind),)))[4].by_layer[20]
        for kind in ("full", "selective")
    }
    tokens, hidden, ffn, heads, tp = 8192, 6656, 17920, 64, 4
    plain = needs(recipe(C1))[4].by_layer[20]
    assert kept["full"] == 2 * tokens * hidden // tp, "the input of the layer alone"
    fewer = 2 * tokens * hidden // tp + 4 * tokens * heads // tp + 2 * 2 * tokens * ffn // tp
    assert kept["selective"] == plain - fewer


def test_parameters_and_states_of_all_ranks_are_those_of_the_model() -> None:
    found = needs(recipe(C1)).values()
    norms = 2 * 60 * 6656 + 6656
    # Two pipelines; the norms, and they alone, are on all four ranks of a stage.
    elements = 2 * (count_parameters(LLAMA_32B) + 3 * norms)
    assert sum(each.parts.parameters for each in found) == 2 * elements
    assert sum(each.parts.gradients for each in found) == 4 * elements
    assert sum(each.parts.master for each in found) == 4 * elements
    assert sum(each.parts.moments for each in found) == 8 * elements


def test_fp32_parameters_are_their_own_master_weights() -> None:
    found = needs(recipe(C1), item=4)[0]
    assert found.parts.master == 0
    assert found.parts.parameters == found.parts.gradients == found.parts.moments // 2


def test_zero_1_cuts_states_over_pipelines_and_keeps_the_gradient_sum_beside_them() -> None:
    plain, cut = needs(recipe(C1))[0].parts, needs(replace(recipe(C1), zero=1))[0].parts
    assert (cut.parameters, cut.master, cut.moments) == (
        plain.parameters,
        plain.master // 2,
        plain.moments // 2,
    )
    assert cut.gradients == plain.gradients + plain.gradients // 2


def test_micro_batches_in_flight_follow_the_schedule() -> None:
    found = needs(recipe(C2))
    assert [found[rank].in_flight for rank in (0, 4, 8, 12)] == [(4,), (3,), (2,), (1,)]
    assert [found[rank].in_flight for rank in (16, 20, 24, 28, 30)] == [(5,), (4,), (3,), (2,), (1,)]
    gpipe = needs(replace(recipe(C2), schedule="gpipe"))
    assert (gpipe[0].in_flight, gpipe[30].in_flight) == ((33,), (31,))


def test_chunks_are_weighed_at_the_same_moment() -> None:
    steps = parse_steps("F0 F1 B0 B1 F0.1 {SEND_F0} B0.1")
    assert most_in_flight(steps, [5, 7]) == (2, 0)
    assert most_in_flight(steps, [5, 11]) == (0, 1)
    assert most_in_flight((), [5]) == (0,)


def test_offload_moves_activations_to_the_host_and_keeps_the_received_ones() -> None:
    plain, moved = needs(recipe(C1))[4], needs(changed(recipe(C1), offload=True))[4]
    received = 3 * 2 * 8192 * 6656 // 4
    small = moved.parts.activations - received
    assert 0 <= small < 3 * 15 * 2 * 2**16
    assert moved.host + moved.parts.activations == plain.parts.activations
    assert plain.host == 0


def test_states_in_host_memory_leave_parameters_and_gradients_on_the_device() -> None:
    plain, moved = needs(recipe(C1))[0], needs(replace(recipe(C1), offload_optimizer=True))[0]
    assert (moved.parts.master, moved.parts.moments) == (0, 0)
    assert moved.parts.gradients == plain.parts.gradients
    assert moved.host == plain.parts.gradients + plain.parts.master + plain.parts.moments


def one_node_70b(micro_batch_size: int = 2) -> Strategy:
    """80 layers on 8 H20: 70B parameters times 18 bytes do not fit."""
    stages = (Stage((0, 1, 2, 3), (0, 39)), Stage((4, 5, 6, 7), (40, 79)))
    return Strategy((Pipeline(8, micro_batch_size, stages),))


def test_what_a_remedy_promises_is_what_it_frees() -> None:
    plan = one_node_70b()
    before = needs(plan, LLAMA_70B)[0]
    assert not before.fits
    assert before.parts.total > before.capacity == 97871 * 2**20
    promised = dict(before.remedies)
    assert list(promised.values()) == sorted(promised.values(), reverse=True)
    tried = {
        "recompute: full": changed(plan, recompute=(Recompute("full"),)),
        "recompute: selective": changed(plan, recompute=(Recompute("selective"),)),
        "offload: true": changed(plan, offload=True),
        "offload_optimizer: true": replace(plan, offload_optimizer=True),
    }
    assert promised.keys() == {*tried, "micro_batch_size: 1"}, "there is nothing to cut with one pipeline"
    for text, other in tried.items():
        assert before.parts.total - needs(other, LLAMA_70B)[0].parts.total == promised[text], text
    smaller = needs(one_node_70b(1), LLAMA_70B)[0]
    freed = before.parts.total - smaller.parts.total
    assert promised["micro_batch_size: 1"] == pytest.approx(freed, rel=0.02)


def test_zero_1_is_a_remedy_where_there_are_several_pipelines() -> None:
    plan = Strategy(
        tuple(Pipeline(8, 1, (Stage((4 * p + 0, 4 * p + 1, 4 * p + 2, 4 * p + 3), (0, 79)),)) for p in (0, 1))
    )
    before, after = (needs(replace(plan, zero=zero), LLAMA_70B)[0] for zero in (0, 1))
    assert before.parts.total - after.parts.total == dict(before.remedies)["zero: 1"]
    assert "zero: 1" not in dict(after.remedies)
    hosted = needs(replace(plan, zero=1, offload_optimizer=True), LLAMA_70B)[0]
    freed = after.parts.total - hosted.parts.total
    assert freed == dict(after.remedies)["offload_optimizer: true"]


def test_what_fits_needs_no_remedy() -> None:
    found = needs(recipe(C1)).values()
    assert all(each.fits and each.remedies == () for each in found)


def test_tokens_are_padded_to_what_sequence_parallelism_cuts() -> None:
    plan = Strategy((Pipeline(1, 3, (Stage((0, 1, 2, 3), (0, 59)),)),), idle_ranks=tuple(range(4, 32)))
    program = Program.build(graph(LLAMA_32B), plan, LLAMA_32B.facts, Cluster.of_nodes({"h20": 4}))  # type: ignore[arg-type]
    assert tokens_of(program, 0, 101) == 304


def test_an_operator_that_is_not_known_is_taken_to_keep_operands_and_result() -> None:
    from hetero_megatron.activations import Numbers, Sizes, keeps

    plan = Strategy((Pipeline(1, 1, (Stage((0,), (0, 59)),)),), idle_ranks=tuple(range(1, 32)))
    program = Program.build(graph(LLAMA_32B), plan, LLAMA_32B.facts, Cluster.of_nodes({"h20": 4}))  # type: ignore[arg-type]
    sizes = Sizes(program.annotated, 0, Numbers(16, 2))
    known = program.annotated.graph.node("layers.0.gate")
    other = Node(known.name, Kind.COMPUTE, known.inputs, module="layers.0.something")
    assert keeps(other, sizes) == {**keeps(known, sizes), "layers.0.gate": 2 * 16 * 17920}
