"""Causal attention inside each packed document, with grouped queries (paper §6.3, Table 6).

Shape legend: `T` packed tokens, `C` heads x head size, `H` heads, `K` head size, `L` tokens of a document.
Sizes are local; how many query heads share a key/value head follows from the widths.
"""

from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.per_batch import PerBatch
from hetero_megatron.layers.ring_attention import ring_attention
from hetero_megatron.layers.ulysses import ulysses_attention
from hetero_megatron.runtime.batch import Segments

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a PyTorch without the packed kernel
    varlen_attn = None  # type: ignore[assignment]  # its absence is asked for in one place


class Attention(Layer):
    """softmax(q k^T / sqrt(K)) v over the earlier tokens of the same document."""

    signature: ClassVar[Signature] = Signature.parse(
        "t (g r k), t (g k), t (g k); segments -> t (g r k)", indivisible=("t", "k"), exact=("g", "r")
    )

    def __init__(self, head_dim: int, borders: PerBatch[Tensor]) -> None:
        super().__init__()
        self.head_dim, self.borders = head_dim, borders

    def forward(self, q_TC: Tensor, k_TC: Tensor, v_TC: Tensor, segments: Segments) -> Tensor:
        """[T, C] from q [T, C] and the narrower k and v.

        Raises:
            LayerError: tokens and segments disagree, or the widths are not whole heads that share evenly.
        """
        tokens, width = q_TC.shape
        head_dim, kv_width = self.head_dim, k_TC.shape[1]
        if tokens != segments.tokens:
            raise LayerError(f"attention: {tokens} tokens, but segments end at {segments.tokens}")
        if width % head_dim or kv_width % head_dim or width % kv_width:
            raise LayerError(
                f"attention: q of width {width} and k, v of width {kv_width} with head_dim {head_dim}: "
                "whole query heads must share whole kv heads evenly"
            )
        q_THK = q_TC.view(tokens, width // head_dim, head_dim)
        k_THK, v_THK = (x_TC.view(tokens, kv_width // head_dim, head_dim) for x_TC in (k_TC, v_TC))
        group, share = self.binding.context if self.binding else None, segments.context
        if group is None or share is None:
            return self._whole(q_THK, k_THK, v_THK, segments)
        if group.mode == "ring":
            return ring_attention(q_THK, k_THK, v_THK, share, group).view(tokens, width)
        return ulysses_attention(q_THK, k_THK, v_THK, share, group, self._whole).view(tokens, width)

    def _whole(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments) -> Tensor:
        """[T, C] over documents of which every token is here."""
        if _has_kernel(q_THK):
            borders = self.borders(segments, q_THK.device, torch.int32)
            return _one_kernel(q_THK, k_THK, v_THK, segments, borders).flatten(1)
        return _by_document(q_THK, k_THK, v_THK, segments)


def document_borders() -> PerBatch[Tensor]:
    """Ends of the non-empty documents as a device tensor, one object for all layers of a model."""

    def make(segments: Segments, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.tensor([0, *(end for _, end in _documents(segments))], dtype=dtype, device=device)

    return PerBatch(make)


def _documents(segments: Segments) -> list[tuple[int, int]]:
    return [(start, end) for start, end in pairwise(segments.cu_seqlens) if end > start]


def _has_kernel(q_THK: Tensor) -> bool:
    """Whether the packed FlashAttention kernel takes these heads; otherwise documents go one by one."""
    half = q_THK.dtype in (torch.bfloat16, torch.float16)
    return q_THK.is_cuda and half and q_THK.shape[-1] % 8 == 0 and varlen_attn is not None


def _one_kernel(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, borders: Tensor) -> Tensor:
    """FlashAttention over all documents at once."""
    if not segments.tokens:
        return q_THK * 1.0
    longest = max(end - start for start, end in _documents(segments))
    grouped = q_THK.shape[1] != k_THK.shape[1]
    result = varlen_attn(
        q_THK, k_THK, v_THK, borders, borders, longest, longest, window_size=(-1, 0), enable_gqa=grouped
    )
    assert isinstance(result, Tensor), "varlen_attn returns a pair only when asked for more"
    return result


def _by_document(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments) -> Tensor:
    """One call per document, or one for all of the same length; a block mask costs three times as much."""
    tokens, width = q_THK.shape[0], q_THK.shape[1] * q_THK.shape[2]
    lengths = [end - start for start, end in _documents(segments)]
    if len(set(lengths)) <= 1:
        return _causal(q_THK, k_THK, v_THK, max(1, len(lengths))).reshape(tokens, width)
    # Split rather than slice: the gradient of a slice is a whole tensor of zeros per document.
    parts = zip(q_THK.split(lengths), k_THK.split(lengths), v_THK.split(lengths), strict=True)
    return torch.cat([_causal(q, k, v, 1).reshape(-1, width) for q, k, v in parts])


def _causal(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, documents: int) -> Tensor:
    """[documents, L, H, K] for consecutive documents of the same length."""
    length = q_THK.shape[0] // documents
    q, k, v = (x.view(documents, length, *x.shape[1:]).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
