"""A Linear is a matrix product; what its shards compute adds up, or stands side by side."""

import torch
from torch import nn

from hetero_megatron.layers import Linear


def _linear() -> tuple[Linear, torch.Tensor]:
    torch.manual_seed(0)
    linear = Linear(6, 4, 0.1)
    nn.init.normal_(linear.weight)
    return linear, torch.randn(5, 6)


def test_linear_is_x_times_the_transposed_weight() -> None:
    linear, x = _linear()
    torch.testing.assert_close(linear(x), x @ linear.weight.T)
    assert dict(linear.named_parameters()).keys() == {"weight"}


def test_a_column_parallel_shard_gives_its_columns_of_the_result() -> None:
    linear, x = _linear()
    whole = linear(x)
    linear.weight = nn.Parameter(linear.weight[1:3].detach())
    torch.testing.assert_close(linear(x), whole[:, 1:3])


def test_row_parallel_shards_add_up_to_the_result() -> None:
    linear, x = _linear()
    whole, weight = linear(x), linear.weight.detach()
    parts = []
    for columns in (slice(0, 2), slice(2, 6)):
        linear.weight = nn.Parameter(weight[:, columns])
        parts.append(linear(x[:, columns]))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_linear_declares_a_linear_signature_and_a_normal_start() -> None:
    assert Linear.signature.linear
    assert Linear(6, 4, 0.1).initial() == {"weight": ("normal", 0.1)}
