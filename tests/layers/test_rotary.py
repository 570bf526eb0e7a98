"""Rotary embedding against complex numbers, in the half layout."""

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import RotaryEmbedding, rotary_angles
from hetero_megatron.runtime.batch import Segments

K, THETA = 8, 10000.0


def _turned_by_complex_numbers(x_THK: Tensor, positions_T: Tensor) -> Tensor:
    half = K // 2
    pairs = torch.complex(x_THK[..., :half].double(), x_THK[..., half:].double())
    frequency = THETA ** (-2.0 * torch.arange(half, dtype=torch.float64) / K)
    angle = positions_T.double()[:, None, None] * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1).float()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_dim_i_turns_with_dim_i_plus_half_by_the_position_in_the_document(heads: int) -> None:
    torch.manual_seed(0)
    rope, segments = RotaryEmbedding(K, rotary_angles(K, THETA)), Segments.of_lengths((64, 3))
    x = torch.randn(67, heads * K, requires_grad=True)
    expected = _turned_by_complex_numbers(x.detach().view(67, heads, K), segments.positions_T)
    turned = rope(x, segments)
    torch.testing.assert_close(turned.view(67, heads, K), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[64], x[64])


def test_the_gradient_is_the_rotation_back() -> None:
    torch.manual_seed(0)
    rope, segments = RotaryEmbedding(K, rotary_angles(K, THETA)), Segments.of_lengths((5,))
    x = torch.randn(5, 2 * K, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rope(x, segments), (x,))


def test_a_shard_of_heads_is_turned_like_the_whole() -> None:
    torch.manual_seed(0)
    rope, segments = RotaryEmbedding(K, rotary_angles(K, THETA)), Segments.of_lengths((5, 2))
    x = torch.randn(7, 4 * K)
    assert torch.equal(rope(x[:, K : 3 * K].contiguous(), segments), rope(x, segments)[:, K : 3 * K])


def test_angles_are_made_in_fp32_and_used_in_the_dtype_of_the_activation() -> None:
    cosine, sine = rotary_angles(K, THETA)(Segments.of_lengths((4096,)), torch.device("cpu"), torch.bfloat16)
    exact, _ = rotary_angles(K, THETA)(Segments.of_lengths((4096,)), torch.device("cpu"), torch.float32)
    assert cosine.dtype is sine.dtype is torch.bfloat16
    assert torch.equal(cosine, exact.bfloat16())


def test_layers_of_one_model_share_the_angles_of_a_micro_batch() -> None:
    angles, segments = rotary_angles(K, THETA), Segments.of_lengths((5,))
    first, second = (RotaryEmbedding(K, angles) for _ in range(2))
    first(torch.zeros(5, K), segments)
    made = angles(segments, torch.device("cpu"), torch.float32)
    second(torch.zeros(5, K), segments)
    assert angles(segments, torch.device("cpu"), torch.float32) is made


def test_odd_heads_missing_positions_and_broken_heads_are_refused() -> None:
    with pytest.raises(LayerError, match="head_dim 7 is odd"):
        rotary_angles(7, THETA)
    rope = RotaryEmbedding(K, rotary_angles(K, THETA))
    with pytest.raises(LayerError, match="rotary embedding: 3 tokens, but segments have 5"):
        rope(torch.zeros(3, K), Segments.of_lengths((5,)))
    with pytest.raises(LayerError, match="width 12 is no multiple of head_dim 8"):
        rope(torch.zeros(5, 12), Segments.of_lengths((5,)))
