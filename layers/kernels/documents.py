"""What attention kernels need to know of a packed micro-batch: where its documents are, and how long.

Shape legend: `T` packed tokens, `H` heads, `K` head size.
"""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from hetero_megatron.runtime.batch import Segments

Attend = Callable[[Tensor, Tensor, Tensor, Segments, Tensor], Tensor]


def documents(segments: Segments) -> list[tuple[int, int]]:
    """Start and end of every document that has a token: kernels differ in what they make of empty ones."""
    return [(start, end) for start, end in pairwise(segments.cu_seqlens) if end > start]


def all_at_once(packed: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]) -> Attend:
    """Attention from a kernel `(q_THK, k_THK, v_THK, borders, longest document)` that takes all documents at once.

    `borders` are the ends of the non-empty documents, int32, on the device, 0 first; the last is T.
    """

    def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, borders: Tensor) -> Tensor:
        if not segments.tokens:
            return q_THK * 1.0
        longest = max(end - start for start, end in documents(segments))
        return packed(q_THK, k_THK, v_THK, borders, longest)

    return attend
