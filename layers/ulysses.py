"""Ulysses: an all-to-all turns tokens of this part with all heads into all tokens with some heads, and back.

In between, attention is that of one device over whole documents.
Shape legend: `T` tokens of this part, `S` tokens of all parts in packed order, `H` query heads, `G` kv heads,
`K` head size, `N` heads that one message holds.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.runtime.batch import Segments
from hetero_megatron.runtime.context import ContextShare
from hetero_megatron.runtime.context_group import ContextGroup

Attend = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


def ulysses_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, share: ContextShare, group: ContextGroup, attend: Attend
) -> Tensor:
    """[T, H, K] by `attend` over whole documents; kv heads that do not go round are repeated; padding gives zeros."""
    count, kv_heads = len(share.parts), k_TGK.shape[1]
    repeats = count // gcd(kv_heads, count)
    if repeats > 1:
        k_TGK, v_TGK = (x.repeat_interleave(repeats, 1) for x in (k_TGK, v_TGK))
    widths = [x.shape[1] // count for x in (q_THK, k_TGK, v_TGK)]
    pieces = zip(
        *(x.split(width, 1) for x, width in zip((q_THK, k_TGK, v_TGK), widths, strict=True)), strict=True
    )
    tokens = [part.tokens for part in share.parts]
    local = q_THK.shape[0]

    def swap(messages: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """All-to-all of [rows, N, K] pieces."""
        shapes = [(number, *messages[0].shape[1:]) for number in rows]
        found: tuple[Tensor, ...] = _AllToAll.apply(group, shapes, *messages)
        return list(found)

    arrived = swap([torch.cat(piece, 1) for piece in pieces], tokens)
    q_SNK, k_SNK, v_SNK = (x.contiguous() for x in torch.cat(arrived)[share.places].split(widths, 1))
    out_SNK = attend(q_SNK, k_SNK, v_SNK, share.whole).view(q_SNK.shape)
    everything = out_SNK.new_zeros(sum(tokens), *out_SNK.shape[1:]).index_copy(0, share.places, out_SNK)
    return torch.cat(swap(everything.split(tokens), [local] * count), 1)


class _AllToAll(torch.autograd.Function):
    """Piece i goes to part i's rank of this lane; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, group: ContextGroup, shapes: list[tuple[int, ...]], *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [tuple(piece.shape) for piece in pieces]
        return _swap(group, shapes, pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_swap(ctx.group, ctx.shapes, gradients)


def _swap(
    group: ContextGroup, shapes: Sequence[tuple[int, ...]], pieces: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    found = group.channel.all_to_all(pieces, sizes)
    return tuple(flat.view(shape) for flat, shape in zip(found, shapes, strict=True))
