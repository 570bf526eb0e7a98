"""Tensor parallelism where sizes do not divide: vocabulary, heads, and key/value heads that ranks share."""

import math
from dataclasses import replace

import pytest
import torch

from hetero_megatron.errors import StrategyError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    T0,
    alter_gradients,
    assert_parity,
    build,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
    zero_head,
)

D0 = sequences(24)
STEPS = [D0[at : at + 4] for at in (0, 4, 8)]


def tensor_parallel(degree: int, sequence_parallel: bool = True) -> Strategy:
    ranks = f"0-{degree - 1}"
    return strategy((2, 2, [stage(ranks, "0-3")]), sequence_parallel=sequence_parallel)


# Vocabulary not divisible by TP: padding columns leak into the softmax or the clipping (O-09).

ODD_VOCABULARY = replace(T0, vocab_size=97)
ODD_LAYOUTS = {"TP2": tensor_parallel(2), "TP4": tensor_parallel(4), "HET4": het4()}


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_an_uneven_vocabulary_trains_twenty_steps_like_one_device(name: str) -> None:
    documents = sequences(80, vocab=97)
    steps = [documents[at : at + 4] for at in range(0, 80, 4)]
    # SGD: with Adam, FP32 rounding alone moves the norm by 2e-3 within 20 steps (one process against FP64).
    settings = OptimizerSettings(name="sgd", lr=0.3, clip_grad=1.0)
    assert any(96 in document for step in steps for document in step), "the last id takes part"
    found = train(ODD_LAYOUTS[name], steps, config=ODD_VOCABULARY, settings=settings)
    assert_parity(found, reference(steps, config=ODD_VOCABULARY, settings=settings))


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_an_uneven_vocabulary_has_no_padding_rows(name: str) -> None:
    found = train(ODD_LAYOUTS[name], [D0[:4]], config=ODD_VOCABULARY, prepare=zero_head)
    # ln 98 = 4.584967 and ln 100 = 4.605170 would be the losses with padding columns in the softmax.
    assert found.losses[0] == pytest.approx(4.574711, abs=1e-6)
    assert found.losses[0] == pytest.approx(math.log(97), abs=1e-6)
    # There is no row, and so no logit, of an id from 97 on: what the ranks of a copy hold adds up to 97 rows.
    copies = {"HET4": 2}.get(name, 1)
    for weight in ("head.weight", "embedding.weight"):
        rows = [shards[weight]["parameter"].shape[0] for shards in found.shards.values() if weight in shards]
        assert sum(rows) == copies * 97, (weight, rows)


# Fewer key/value heads than ranks: a raw shape error in the middle of the forward (O-11).


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_kv_heads_on_four_ranks_are_copied(sequence_parallel: bool) -> None:
    found = train(tensor_parallel(4, sequence_parallel), STEPS)
    assert_parity(found, reference(STEPS))
    kv_size = T0.kv_size
    for shards in found.shards.values():
        assert shards["layers.0.wk.weight"]["parameter"].shape == (kv_size // 2, T0.hidden_size), (
            "one kv head each"
        )


WIDE = replace(T0, num_attention_heads=6, hidden_size=48)


@pytest.mark.parametrize(
    ("config", "degree", "words"),
    [
        (
            T0,
            3,
            r"stage 0: 4 attention heads \(2 kv heads\) cannot be split over TP 3; TP must divide 4",
        ),
        (
            WIDE,
            4,
            r"stage 0: 6 attention heads \(2 kv heads\) cannot be split over TP 4; TP must divide 6",
        ),
        (
            replace(WIDE, num_query_groups=3),
            2,
            "stage 0: 3 kv heads cannot be split or copied over TP 2; one of the two must divide the other",
        ),
    ],
    ids=["4 heads, TP3", "6 heads, TP4", "3 kv heads, TP2"],
)
def test_heads_that_do_not_divide_are_refused_before_any_process(
    config: LlamaConfig, degree: int, words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        build(Llama(config), tensor_parallel(degree))


# Copied key/value weights drift, or get only the gradient of their own query heads (O-12).

ONE_KV_HEAD = replace(T0, num_query_groups=1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_shared_kv_head_gets_the_gradient_of_all_its_query_heads(
    degree: int, sequence_parallel: bool
) -> None:
    found = train(tensor_parallel(degree, sequence_parallel), STEPS, config=ONE_KV_HEAD)
    assert_parity(found, reference(STEPS, config=ONE_KV_HEAD))
    first, *others = found.shards.values()
    for name in (f"layers.{layer}.{module}.weight" for layer in range(4) for module in ("wk", "wv")):
        for kind, copy in first[name].items():
            assert all(torch.equal(copy, other[name][kind]) for other in others), (
                f"copies of {kind} of {name} drifted"
            )


def test_a_shared_kv_head_in_pipelines_of_unequal_degree() -> None:
    plan = strategy((2, 1, [stage("0-3", "0-1"), stage("4-5", "2-3")]), (2, 1, [stage("6", "0-3")]))
    found = train(plan, STEPS, config=ONE_KV_HEAD)
    assert_parity(found, reference(STEPS, config=ONE_KV_HEAD))


@pytest.mark.parametrize("degree", [2, 4])
def test_shared_kv_heads_count_once_in_the_norm(degree: int) -> None:
    found = train(
        tensor_parallel(degree),
        STEPS[:1],
        config=ONE_KV_HEAD,
        prepare=lambda session: alter_gradients(
            session, lambda slot, gradient, divisor: gradient.fill_(divisor)
        ),
    )
    # 41,248 parameters: 512 fewer per layer than with two kv heads.
    assert found.norms[0] == pytest.approx(203.0960, abs=1e-3)
