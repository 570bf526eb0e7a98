"""Sizes that nothing divides: vocabulary, heads, feed-forward, lengths, stages without layers, idle ranks.

SGD, because Adam blows up FP32 rounding where few targets are left.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Stage, Strategy
from tests.distributed.training import (
    T0,
    Document,
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
# 97 is prime, and 65 = 5 x 13: no degree divides them.
ODD = LlamaConfig(
    num_layers=4,
    hidden_size=48,
    ffn_hidden_size=65,
    num_attention_heads=6,
    num_query_groups=3,
    vocab_size=97,
)
D0 = sequences(24, vocab=97)
# 16, 9, 1 and 15 tokens: totals of micro-batches that 2 and 3 do not divide either.
LENGTHS = (16, 9, 1, 15)
STEPS = [
    tuple(document[:length] for document, length in zip(D0[at : at + 4], LENGTHS, strict=True))
    for at in (0, 4, 8)
]


def check(plan: Strategy, config: LlamaConfig, steps: Sequence[tuple[Document, ...]] = STEPS) -> Any:
    found = train(plan, steps, config, SGD)
    assert_parity(found, reference(steps, config, SGD))
    return found


# Three ranks: 6 heads with 6, 3 or 1 kv heads; two kv heads cannot be shared by three ranks.


@pytest.mark.parametrize(("kv_heads", "tied"), [(6, False), (3, True), (1, True)])
def test_three_ranks_share_a_vocabulary_of_97_and_a_feed_forward_of_65(kv_heads: int, tied: bool) -> None:
    config = replace(ODD, num_query_groups=kv_heads, tie_word_embeddings=tied)
    found = check(strategy((2, 2, [stage("0-2", "0-3")])), config)
    rows = [shards["embedding.weight"]["parameter"].shape[0] for shards in found.shards.values()]
    assert (sorted(rows), sum(rows)) == ([32, 32, 33], 97)
    columns = [shards["layers.0.gate.weight"]["parameter"].shape[0] for shards in found.shards.values()]
    assert (sorted(columns), sum(columns)) == ([21, 22, 22], 65)


@pytest.mark.parametrize(
    ("kv_heads", "degree", "tied", "sequence_parallel"),
    [
        (6, 2, True, True),
        (6, 2, False, False),
        (2, 2, False, True),
        (2, 2, True, False),
        (1, 2, True, True),
        (2, 6, False, True),
    ],
)
def test_heads_shared_evenly_train_with_everything_else_uneven(
    kv_heads: int, degree: int, tied: bool, sequence_parallel: bool
) -> None:
    plan = strategy((2, 2, [stage(f"0-{degree - 1}", "0-3")]), sequence_parallel=sequence_parallel)
    check(plan, replace(ODD, num_query_groups=kv_heads, tie_word_embeddings=tied))


# Stages of degree 3, 2 and 1: rows of 97 and 65 are cut at edges that meet nowhere.


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pipelines_of_degrees_3_2_and_1_meet_in_odd_sizes(tied: bool) -> None:
    config = replace(ODD, num_query_groups=6, tie_word_embeddings=tied)
    plan = strategy(
        (2, 1, [stage("0-2", "0-1"), stage("3", "2-3")]),
        (1, 2, [stage("4-5", "0-2"), stage("6", "3")]),
    )
    check(plan, config)


# Stages that hold only the embedding or only the head.

EDGES = {
    "embedding alone": [stage("0", None), stage("1-2", "0-3")],
    "head alone": [stage("0-1", "0-3"), stage("2", None)],
    "both alone": [stage("0-1", None), stage("2", "0-3"), stage("3-4", None)],
    "both alone, two stages between": [
        stage("0", None),
        stage("1-2", "0-2"),
        stage("3", "3"),
        stage("4-5", None),
    ],
}


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in EDGES), ("both alone", False)])
def test_embedding_and_head_alone_on_their_stages_cut_an_odd_vocabulary(name: str, tied: bool) -> None:
    config = replace(ODD, num_query_groups=6, tie_word_embeddings=tied)
    found = check(strategy((2, 2, EDGES[name])), config)
    first = {name for rank in EDGES[name][0].ranks for name in found.shards[rank]}
    last = {name for rank in EDGES[name][-1].ranks for name in found.shards[rank]}
    if EDGES[name][0].layers is None:
        assert first == {"embedding.weight"}
    if EDGES[name][-1].layers is None:
        assert last == {"final_norm.weight", "embedding.weight" if tied else "head.weight"}


def test_an_edge_stage_next_to_a_pipeline_of_one_stage() -> None:
    plan = strategy((1, 2, EDGES["both alone"]), (1, 2, [stage("5", "0-3")]))
    check(plan, replace(ODD, num_query_groups=6, tie_word_embeddings=True))


# Fewer kv heads than ranks: copies see the gradient of all their query heads and stay equal.


@pytest.mark.parametrize(("kv_heads", "tied"), [(2, False), (1, True)])
def test_copied_kv_heads_on_four_ranks_stay_bit_equal(kv_heads: int, tied: bool) -> None:
    config = replace(T0, num_query_groups=kv_heads, vocab_size=97, tie_word_embeddings=tied)
    found = check(strategy((2, 2, [stage("0-3", "0-3")])), config)
    copies = 4 // kv_heads
    for layer in range(4):
        for name in (f"layers.{layer}.{module}.weight" for module in ("wk", "wv")):
            for kind in ("parameter", "gradient"):
                shards = [found.shards[rank][name][kind] for rank in range(4)]
                assert shards[0].shape == (config.head_size, config.hidden_size), "one kv head on each rank"
                for rank in range(4):
                    assert torch.equal(shards[rank], shards[rank // copies * copies]), f"{kind} of {name}"


# Ranks that are left out, also between those that work.


@pytest.mark.parametrize(
    "plan",
    [
        strategy((4, 1, [stage("0", "0-1"), Stage((2, 3), (2, 3))]), idle_ranks=(1,)),
        strategy((2, 1, [Stage((0, 2), (0, 3))]), (2, 1, [stage("3", "0-3")]), idle_ranks=(1,)),
        strategy((2, 1, [Stage((5, 2), (0, 3))]), (2, 1, [stage("3", "0-3")]), idle_ranks=(0, 1, 4)),
    ],
    ids=["R0 > R2-3", "R0,2 and R3", "R5,2 and R3"],
)
def test_ranks_with_gaps_between_them_train(plan: Strategy) -> None:
    found = check(plan, replace(T0, vocab_size=97, tie_word_embeddings=True))
    assert sorted(found.shards) == list(plan.ranks)


def test_het4_on_other_ranks_trains_to_the_same_bits() -> None:
    """Ranks are names: which ones work, and which are idle between them, changes no sum."""
    config = replace(T0, vocab_size=97)
    moved = {0: 1, 1: 2, 2: 4, 3: 7}
    plan = het4()
    renamed = replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(replace(s, ranks=tuple(moved[r] for r in s.ranks)) for s in pipeline.stages),
            )
            for pipeline in plan.pipelines
        ),
        idle_ranks=(0, 3, 5, 6),
    )
    one, other = train(plan, STEPS, config, SGD), train(renamed, STEPS, config, SGD)
    assert one.losses == other.losses
    for name, tensors in one.tensors.items():
        assert torch.equal(tensors["parameter"], other.tensors[name]["parameter"]), name
