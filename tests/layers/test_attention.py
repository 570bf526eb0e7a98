"""Packed grouped causal attention against a softmax over an explicit mask."""

import math

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import Attention, document_borders
from hetero_megatron.runtime.batch import Segments
from hetero_megatron.runtime.binding import Binding

K = 8


def _attention() -> Attention:
    return Attention(K, document_borders())


def _naive(q_TC: Tensor, k_TC: Tensor, v_TC: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """One head at a time, scores of all pairs, -inf where a token may not look."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(document))
    allowed = (document[:, None] == document[None, :]) & (order[:, None] >= order[None, :])
    heads, kv_heads = q_TC.shape[1] // K, k_TC.shape[1] // K
    results = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        q, k, v = (x[:, h * K : (h + 1) * K] for x, h in ((q_TC, head), (k_TC, kv), (v_TC, kv)))
        scores = (q @ k.T / math.sqrt(K)).masked_fill(~allowed, -math.inf)
        results.append(scores.softmax(-1) @ v)
    return torch.cat(results, 1)


def _qkv(tokens: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = (heads * K, kv_heads * K, kv_heads * K)
    q, k, v = (torch.randn(tokens, width, generator=generator).requires_grad_() for width in widths)
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16,), (7, 9), (8, 8), (1, 1, 14), (0, 5, 0, 4), (0, 0)])
def test_values_and_gradients_are_those_of_a_masked_softmax(kv_heads: int, lengths: tuple[int, ...]) -> None:
    inputs = _qkv(sum(lengths), 4, kv_heads)
    weights = torch.randn(sum(lengths), 4 * K)
    expected = _naive(*inputs, lengths)
    wanted = torch.autograd.grad(expected, inputs, weights)
    result = _attention()(*inputs, Segments.of_lengths(lengths))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for gradient, right in zip(torch.autograd.grad(result, inputs, weights), wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


def test_empty_segments_change_nothing_bit_for_bit() -> None:
    q, k, v = _qkv(9, 4, 2)
    positions = Segments.of_lengths((5, 4)).positions_T
    plain = _attention()(q, k, v, Segments(positions, (0, 5, 9)))
    assert torch.equal(_attention()(q, k, v, Segments(positions, (0, 0, 5, 5, 9, 9))), plain)


def test_a_document_does_not_see_its_neighbour_bit_for_bit() -> None:
    q, k, v = (x.detach() for x in _qkv(16, 4, 2))
    segments = Segments.of_lengths((7, 9))
    before = _attention()(q, k, v, segments)
    for x in (q, k, v):
        x[3] += 1.0
    after = _attention()(q, k, v, segments)
    assert torch.equal(after[7:], before[7:])
    assert not torch.equal(after[:7], before[:7])


def test_a_shard_of_heads_gives_its_columns() -> None:
    q, k, v = _qkv(16, 4, 2)
    segments = Segments.of_lengths((7, 9))
    whole = _attention()(q, k, v, segments)
    shard = _attention()(q[:, 2 * K :], k[:, K:], v[:, K:], segments)
    torch.testing.assert_close(shard, whole[:, 2 * K :])


def test_copied_kv_heads_serve_part_of_the_query_heads_each() -> None:
    q, k, v = _qkv(16, 4, 1)
    segments = Segments.of_lengths((16,))
    whole = _attention()(q, k, v, segments)
    shards = [_attention()(q[:, part], k, v, segments) for part in (slice(0, 2 * K), slice(2 * K, 4 * K))]
    torch.testing.assert_close(torch.cat(shards, 1), whole)


def test_a_micro_batch_without_tokens_passes_through() -> None:
    q, k, v = _qkv(0, 4, 2)
    assert _attention()(q, k, v, Segments.of_lengths((0,))).shape == (0, 4 * K)


def test_the_chosen_kernel_is_given_heads_segments_and_the_borders_of_non_empty_documents() -> None:
    seen = []

    def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, borders: Tensor) -> Tensor:
        seen.append(
            (q_THK.shape, k_THK.shape, v_THK.shape, segments.cu_seqlens, borders.dtype, borders.tolist())
        )
        return q_THK * 2.0

    layer = _attention()
    layer.bind(Binding("attention", {}, {}, kernels={"attention": attend}))
    q, k, v = _qkv(9, 4, 2)
    assert torch.equal(layer(q, k, v, Segments.of_lengths((0, 5, 0, 4))), q * 2.0)
    assert seen == [((9, 4, K), (9, 2, K), (9, 2, K), (0, 0, 5, 5, 9), torch.int32, [0, 5, 9])]


def test_wrong_segments_and_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(LayerError, match="attention: 9 tokens, but segments end at 8"):
        _attention()(*_qkv(9, 4, 2), Segments.of_lengths((8,)))
    with pytest.raises(
        LayerError, match="q of width 24 and k, v of width 16 with head_dim 8: whole query heads"
    ):
        _attention()(*_qkv(8, 3, 2), Segments.of_lengths((8,)))
