"""Causal attention inside each packed document, with grouped queries (paper §6.3, Table 6).

Shape legend: `T` packed tokens, `C` heads x head size, `H` heads, `K` head size.
Sizes are local; how many query heads share a key/value head follows from the widths.
"""

from typing import ClassVar

import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.kernels.documents import Attend, documents
from hetero_megatron.layers.kernels.torch_attention import by_document
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.per_batch import PerBatch
from hetero_megatron.layers.ring_attention import ring_attention
from hetero_megatron.layers.ulysses import ulysses_attention
from hetero_megatron.runtime.batch import Segments, on_device


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
        if group is None:
            return self._whole(q_THK, k_THK, v_THK, segments).view(tokens, width)
        assert share is not None, "a context-parallel part is given segments that were cut for it"
        if group.mode == "ring":
            return ring_attention(q_THK, k_THK, v_THK, share, group).view(tokens, width)
        return ulysses_attention(q_THK, k_THK, v_THK, share, group, self._whole).view(tokens, width)

    def _whole(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments) -> Tensor:
        """[T, H, K] over documents of which every token is here."""
        attend: Attend = self.kernel("attention", by_document)
        return attend(q_THK, k_THK, v_THK, segments, self.borders(segments, q_THK.device, torch.int32))


def document_borders() -> PerBatch[Tensor]:
    """Ends of the non-empty documents as a device tensor, one object for all layers of a model."""

    def make(segments: Segments, device: torch.device, dtype: torch.dtype) -> Tensor:
        ends = [0, *(end for _, end in documents(segments))]
        return on_device(torch.tensor(ends, dtype=dtype), device)

    return PerBatch(make)
