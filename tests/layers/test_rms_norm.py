"""RMSNorm against the formula."""

import torch
from torch import nn

from hetero_megatron.layers import RMSNorm


def test_rms_norm_divides_by_the_root_mean_square_and_scales() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(8, 1e-5), torch.randn(5, 8)
    norm.weight = nn.Parameter(torch.randn(8))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_a_token_shard_gives_its_rows_bit_for_bit() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(8, 1e-5), torch.randn(5, 8)
    nn.init.ones_(norm.weight)
    assert torch.equal(norm(x[2:4]), norm(x)[2:4])


def test_the_hidden_dim_is_indivisible_and_the_weight_starts_at_one() -> None:
    assert tuple(RMSNorm.signature.indivisible) == ("h",)
    assert RMSNorm(8, 1e-5).initial() == {"weight": ("ones",)}
