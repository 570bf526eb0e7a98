"""A bias is added to every token, once."""

import pytest
import torch

from hetero_megatron.annotation import Annotation
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.rules import derive
from hetero_megatron.layers import Bias
from hetero_megatron.layers.bias import plus

SIZES = (("f", 8), ("t", 4))


def test_a_bias_is_added_to_every_token_and_starts_at_zero() -> None:
    bias, x = Bias(8), torch.randn(4, 8)
    torch.nn.init.constant_(bias.bias, 2.0)
    assert torch.equal(bias(x), x + 2.0)
    assert bias.initial() == {"bias": ("zeros",)}
    assert plus(None, x) is x
    assert torch.equal(plus(bias, x), x + 2.0)


def test_split_features_stay_split_and_split_tokens_make_the_gradient_partial() -> None:
    columns = derive(Bias.signature, SIZES, (Annotation.on((0, 1), {1: 2}), Annotation.on((0, 1), {0: 2})))
    assert columns.output == Annotation.on((0, 1), {1: 2})
    assert columns.gradients[1] == Annotation.on((0, 1), {0: 2})
    tokens = derive(Bias.signature, SIZES, (Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})))
    assert tokens.gradients == (Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-2: 2}))


def test_a_bias_is_not_added_to_every_addend_of_a_sum() -> None:
    with pytest.raises(GraphError, match="operand 1 is not and would be added several times"):
        derive(Bias.signature, SIZES, (Annotation.on((0, 1), {-2: 2}), Annotation.on((0, 1), {-1: 2})))
