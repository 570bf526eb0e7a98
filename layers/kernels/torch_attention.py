"""Attention with nothing but torch: document by document, or all at once with the packed kernel of newer versions.

Shape legend: `T` packed tokens, `H` heads, `K` head size, `L` tokens of a document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.layers.kernels.documents import Attend, all_at_once, documents
from hetero_megatron.layers.kernels.kernel import Kernel, needs
from hetero_megatron.runtime.batch import Segments


def by_document(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, borders: Tensor | None = None
) -> Tensor:
    """[T, H, K]: one call per document, or one for all of the same length; a block mask costs three times as much."""
    lengths = [end - start for start, end in documents(segments)]
    if len(set(lengths)) <= 1:
        return _causal(q_THK, k_THK, v_THK, max(1, len(lengths))).reshape(q_THK.shape)
    # Split rather than slice: the gradient of a slice is a whole tensor of zeros per document.
    parts = zip(q_THK.split(lengths), k_THK.split(lengths), v_THK.split(lengths), strict=True)
    return torch.cat([_causal(q, k, v, 1).reshape(q.shape) for q, k, v in parts])


def _causal(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, count: int) -> Tensor:
    """[count, L, H, K] for `count` consecutive documents of the same length."""
    length = q_THK.shape[0] // count
    q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _load_varlen() -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    def packed(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, borders: Tensor, longest: int) -> Tensor:
        grouped = q_THK.shape[1] != k_THK.shape[1]
        result = varlen_attn(
            q_THK, k_THK, v_THK, borders, borders, longest, longest, window_size=(-1, 0), enable_gqa=grouped
        )
        assert isinstance(result, Tensor), "varlen_attn returns a pair only when asked for more"
        return result

    return all_at_once(packed)


# Written from torch 2.13's documentation; it needs an NVIDIA GPU of compute capability 8.0 and has not been run here.
VARLEN = Kernel(
    "attention",
    "torch-varlen",
    needs(
        cuda=True,
        half=True,
        whole_eights=True,
        modules=("torch.nn.attention.varlen",),
        install="it comes with newer versions of torch",
    ),
    _load_varlen,
)
BY_DOCUMENT = Kernel("attention", "torch-sdpa", needs(), lambda: by_document)
