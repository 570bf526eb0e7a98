"""From a strategy to annotations: Megatron's tensor-parallel roles, stage by stage."""

from dataclasses import replace

import pytest

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layout import PARAMETER_ROLES, RESHARD_ROLES, annotate
from hetero_megatron.models.llama import Llama
from hetero_megatron.strategy import Stage, Strategy
from tests.distributed.training import T0, het4, stage, strategy

GRAPH = trace(Llama(T0))
BIASED = replace(T0, qkv_bias=True, attention_out_bias=True, mlp_bias=True)


def annotated(plan: Strategy) -> dict[str, Annotation]:
    return dict(annotate(plan, T0.facts, GRAPH.parameters, GRAPH.reshards, GRAPH.inputs))


def on(*subgroups: tuple[tuple[int, ...], dict[int, int]], hdim: int = -1) -> Annotation:
    groups, states = zip(*subgroups, strict=True)
    return Annotation(tuple(map(DeviceGroup, groups)), tuple(map(DistributedStates.of, states)), hdim)


def test_every_leaf_and_every_reshard_has_an_annotation() -> None:
    assert annotated(het4()).keys() == {*GRAPH.parameters, *GRAPH.reshards, *GRAPH.inputs}
    biased = trace(Llama(BIASED))
    modules = {name.rsplit(".", 1)[0].rsplit(".", 1)[-1] for name in biased.parameters}
    assert modules == set(PARAMETER_ROLES)
    assert {name.rsplit(".", 1)[-1] for name in GRAPH.reshards} == set(RESHARD_ROLES)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("embedding", {0: 2}),
        ("layers.1.attention_norm", {-1: 2}),
        ("layers.1.wq", {0: 2}),
        ("layers.1.wk", {0: 2}),
        ("layers.1.wv", {0: 2}),
        ("layers.1.wo", {1: 2}),
        ("layers.1.mlp_norm", {-1: 2}),
        ("layers.1.gate", {0: 2}),
        ("layers.1.up", {0: 2}),
        ("layers.1.down", {1: 2}),
    ],
)
def test_parameters_are_cut_as_megatron_cuts_them_and_copied_across_pipelines(
    name: str, parts: dict[int, int]
) -> None:
    found = annotated(het4())[f"{name}.weight"]
    assert found == on(((0, 1), parts), ((3,), {}))
    alone = annotated(strategy((1, 1, [stage("0-1", "0-3")])))[f"{name}.weight"]
    assert alone == on(((0, 1), parts)), "one pipeline: no top tier"


def test_what_stands_behind_the_layers_is_on_the_last_stage() -> None:
    found = annotated(het4())
    for name in ("layers.3.wq.weight", "final_norm.weight", "head.weight"):
        assert found[name] == on(((2,), {}), ((3,), {})), name
    for name in ("layers.3.entry", "final_entry", "head_in", "targets"):
        assert found[name] == on(((2,), {}), ((3,), {}), hdim=0), name
    assert found["tokens"] == on(((0, 1), {-1: 2}), ((3,), {}), hdim=0)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tokens_are_cut_between_the_blocks_under_sequence_parallelism_only(sequence_parallel: bool) -> None:
    found = annotated(het4(sequence_parallel=sequence_parallel))
    between, inside = on(((0, 1), {0: 2}), ((3,), {}), hdim=0), on(((0, 1), {-1: 2}), ((3,), {}), hdim=0)
    for name in ("embedding_out", "layers.1.entry", "layers.1.attention_out", "layers.1.mlp_out"):
        assert found[name] == (between if sequence_parallel else inside), name
    for name in ("layers.1.attention_in", "layers.1.mlp_in"):
        assert found[name] == inside, name


def test_a_tied_weight_is_on_the_first_and_the_last_stage_of_every_pipeline_once() -> None:
    tied = replace(T0, tie_word_embeddings=True)
    graph = trace(Llama(tied))
    assert "head.weight" not in graph.parameters
    found = annotate(het4(zero=1), tied.facts, graph.parameters, graph.reshards, graph.inputs)
    union = on(((0, 1), {0: 2}), ((2,), {}), ((3,), {}))
    assert found["embedding.weight"] == union
    assert found["embedding.weight@state"] == union.replace(hdim=1)
    parts = strategy((1, 1, [Stage((0, 1, 2), (0, 1), (2, 1)), Stage((3, 4), (2, 3), 1, 2)]))
    cut = annotate(parts, tied.facts, ["embedding.weight"], [], [])
    assert cut["embedding.weight"] == on(((0, 1), {0: 2}), ((2,), {}), ((3,), {}), ((4,), {}))


def test_fewer_kv_heads_than_ranks_are_cut_into_heads_and_copied() -> None:
    found = annotated(strategy((1, 1, [stage("0-3", "0-3")])))
    assert found["layers.0.wk.weight"] == found["layers.0.wv.weight"] == on(((0, 1, 2, 3), {0: 2, -1: 2}))
    assert found["layers.0.wq.weight"] == on(((0, 1, 2, 3), {0: 4}))


def test_edge_stages_without_layers_hold_the_embedding_and_the_head() -> None:
    found = annotated(strategy((1, 1, [stage("0", None), stage("1", "0-3"), stage("2", None)])))
    assert (found["embedding.weight"], found["embedding_out"]) == (on(((0,), {})),) * 2
    assert (found["layers.0.entry"], found["layers.3.mlp_out"]) == (on(((1,), {})),) * 2
    assert (found["final_entry"], found["final_norm.weight"], found["head.weight"]) == (on(((2,), {})),) * 3


@pytest.mark.parametrize(
    ("parameters", "reshards", "message"),
    [
        (
            ["layers.0.router.weight"],
            [],
            "parameter layers.0.router: no tensor-parallel role is known for 'router'",
        ),
        (
            [],
            ["layers.0.detour"],
            "Reshard layers.0.detour: no tensor-parallel role is known for 'detour'; known: .*'entry'",
        ),
    ],
)
def test_a_module_without_a_role_is_named_with_those_that_have_one(
    parameters: list[str], reshards: list[str], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        annotate(het4(), T0.facts, parameters, reshards, [])


def test_a_bias_is_cut_as_the_result_it_is_added_to_and_its_states_stay_where_they_are_under_zero() -> None:
    graph = trace(Llama(BIASED))
    found = dict(annotate(replace(het4(), zero=1), T0.facts, graph.parameters, graph.reshards, graph.inputs))
    for name in ("wq", "wk", "wv", "gate", "up"):
        cut = found[f"layers.1.{name}_bias.bias"]
        assert cut == on(((0, 1), {0: 2}), ((3,), {}))
        assert found[f"layers.1.{name}_bias.bias@state"] == cut
    for name in ("wo", "down"):
        assert found[f"layers.1.{name}_bias.bias"] == on(((0, 1), {-1: 2}), ((3,), {}))
        assert found[f"layers.1.{name}_bias.bias@state"] == on(((0, 1), {-1: 2}), ((3,), {}), hdim=0)
    wide = dict(
        annotate(
            strategy((1, 1, [stage("0-3", "0-3")])),
            T0.facts, graph.parameters, graph.reshards, graph.inputs,
        )
    )  # fmt: skip
    assert wide["layers.1.wk_bias.bias"] == on(((0, 1, 2, 3), {0: 2, -1: 2})), "two kv heads on four ranks"
