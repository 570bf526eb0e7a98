"""Sizes that describe no model are refused; parameters and FLOPs follow from the sizes."""

from dataclasses import replace

import pytest

from hetero_megatron.errors import ModelError
from hetero_megatron.models import Llama, LlamaConfig, count_parameters, flops_per_token

T0 = LlamaConfig(4, 32, 64, 4, 2, 96)


def test_the_tiny_model_of_the_cases_has_43_296_parameters() -> None:
    assert count_parameters(T0) == 43_296
    assert count_parameters(replace(T0, num_layers=7)) == 71_136
    assert count_parameters(replace(T0, num_query_groups=1)) == 41_248


def test_a_tied_head_adds_no_parameter_and_costs_its_product() -> None:
    tied = replace(T0, tie_word_embeddings=True)
    assert count_parameters(tied) == 40_224
    assert sum(parameter.numel() for parameter in Llama(tied).parameters()) == 40_224
    assert flops_per_token(tied, 16) == flops_per_token(T0, 16)
    assert (T0.facts.tie_word_embeddings, tied.facts.tie_word_embeddings) == (False, True)


def test_biases_are_counted_where_they_are_switched_on() -> None:
    for switches, per_layer in (
        ({"qkv_bias": True}, 32 + 16 + 16),
        ({"attention_out_bias": True}, 32),
        ({"mlp_bias": True}, 64 + 64 + 32),
        ({"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}, 256),
    ):
        config = replace(T0, **switches)
        assert count_parameters(config) == 43_296 + 4 * per_layer
        assert sum(p.numel() for p in Llama(config).parameters()) == count_parameters(config)


def test_flops_are_six_per_matrix_weight_and_half_a_square_of_attention() -> None:
    matrices = 4 * (9_280 - 64) + 3_072
    assert flops_per_token(T0, 0) == 6 * matrices
    # Scores and their product with v: 2 x 2 x 32 x (16 / 2) forward, three times that in all, 4 layers.
    assert flops_per_token(T0, 16) - flops_per_token(T0, 0) == 4 * 3 * (2 * 2 * 32 * 8)


def test_the_head_size_is_derived_or_given() -> None:
    assert (T0.head_size, T0.query_size, T0.kv_size) == (8, 32, 16)
    wide = replace(T0, head_dim=16)
    assert (wide.head_size, wide.query_size, wide.kv_size) == (16, 64, 32)


def test_facts_are_what_a_strategy_has_to_fit() -> None:
    facts = T0.facts
    assert (facts.num_layers, facts.num_attention_heads, facts.num_query_groups) == (4, 4, 2)
    assert (facts.ffn_hidden_size, facts.vocab_size) == (64, 96)


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_query_groups", "head_dim", "rope_theta"])
def test_a_size_that_is_not_positive_is_refused(field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is -1; it must be positive"):
        replace(T0, **{field: -1})
    with pytest.raises(ModelError, match=f"{field} is 0; it must be positive"):
        replace(T0, **{field: 0})


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match="4 attention heads cannot share 3 kv heads: 3 must divide 4"):
        replace(T0, num_query_groups=3)
    with pytest.raises(ModelError, match="hidden_size 32 is no multiple of 6 attention heads"):
        replace(T0, num_attention_heads=6)
    assert replace(T0, num_attention_heads=6, head_dim=8).query_size == 48
    with pytest.raises(ModelError, match="head_dim is 7; rotary embedding turns pairs of dims"):
        replace(T0, head_dim=7)
