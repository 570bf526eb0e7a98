"""Ring attention over context-parallel parts, with zigzag chunks (paper Figure 4).

In step s of n, part p's queries meet the keys and values of part p-s, while those of step s+1 are on their way.
Each owner sends just the rows that the receiver can see and the heads that it works with, so parts may differ in
tensor-parallel degree. The backward pass sends keys and values again and gives their gradients back.

Shape legend: `T` tokens of this part, `J` key rows that one part's queries see, `H` query heads, `G` kv heads,
`K` head size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.layers.attention_block import attend, attend_backward
from hetero_megatron.runtime.context import ContextShare, Rows
from hetero_megatron.runtime.context_group import GRADIENTS_TAG, KEYS_TAG, ContextGroup


def ring_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, share: ContextShare, group: ContextGroup
) -> Tensor:
    """[T, H, K]: every real token looks at the earlier tokens of its document in all parts; padding gives zeros."""
    result: Tensor = _RingAttention.apply(
        q_THK.contiguous(), k_TGK.contiguous(), v_TGK.contiguous(), share, group
    )
    return result


class _RingAttention(torch.autograd.Function):
    """Partial results are merged in FP32 by their log-sum-exp; keys and values of other parts are not kept."""

    @staticmethod
    def forward(
        ctx: Any, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, share: ContextShare, group: ContextGroup
    ) -> Tensor:
        out_THK = _wide_zeros(q_THK)
        lse_TH = out_THK.new_zeros(q_THK.shape[:2])
        for part, k_JGK, v_JGK in _keys_by_part(k_TGK, v_TGK, share, group):
            pairs, own = share.sees[part], part == share.part
            if pairs.keys:
                out, lse = attend(q_THK[pairs.q_rows], k_JGK, v_JGK, pairs, causal=own)
                if own:
                    out_THK[pairs.q_rows], lse_TH[pairs.q_rows] = out.to(out_THK.dtype), lse
                else:
                    _merge(out_THK, lse_TH, pairs.q_rows, out, lse)
        result = out_THK.to(q_THK.dtype)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, result, lse_TH)
        ctx.share, ctx.group = share, group
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_THK, k_TGK, v_TGK, out_THK, lse_TH = ctx.saved_tensors
        share: ContextShare = ctx.share
        group: ContextGroup = ctx.group
        by_query = (gradients[0].contiguous(), q_THK)
        dq_THK, dk_TGK, dv_TGK = (_wide_zeros(x) for x in (q_THK, k_TGK, v_TGK))
        finish: Callable[[], None] = _nothing
        for part, k_JGK, v_JGK in _keys_by_part(k_TGK, v_TGK, share, group):
            pairs, own = share.sees[part], part == share.part
            dk_JGK, dv_JGK = k_JGK, v_JGK  # no rows where nothing is seen
            if pairs.keys:
                rows = pairs.q_rows
                grad, q, out, lse = (x[rows] for x in (*by_query, out_THK, lse_TH))
                dq, dk_JGK, dv_JGK = attend_backward(grad, q, k_JGK, v_JGK, out, lse, pairs, causal=own)
                dq_THK[rows] += dq
            if own:
                dk_TGK[pairs.k_rows] += dk_JGK
                dv_TGK[pairs.k_rows] += dv_JGK
            else:
                finish()
                finish = _give_back(dk_JGK, dv_JGK, dk_TGK, dv_TGK, share, group, part)
        finish()
        return dq_THK.to(q_THK.dtype), dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None


def _wide_zeros(x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def _nothing() -> None:
    pass


def _merge(out_THK: Tensor, lse_TH: Tensor, rows: Rows, out: Tensor, lse: Tensor) -> None:
    """Take the result over further keys of some queries into what is there."""
    before = lse_TH[rows]
    after = torch.logaddexp(before, lse)
    kept, added = (before - after).exp_()[..., None], (lse - after).exp_()[..., None]
    out_THK[rows] = (out_THK[rows] * kept).addcmul_(out.to(out_THK.dtype), added)
    lse_TH[rows] = after


def _keys_by_part(
    k_TGK: Tensor, v_TGK: Tensor, share: ContextShare, group: ContextGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The part, and the rows of its keys and values that this part sees: the own ones, then one part per step.

    The next step's messages are posted before the last one's rows are handed out.
    """
    count, rows = len(share.parts), share.sees[share.part].k_rows
    arrive = _exchange_keys(k_TGK, v_TGK, share, group, 1)
    yield share.part, k_TGK[rows], v_TGK[rows]
    for step in range(1, count):
        k_JGK, v_JGK = arrive()
        if step + 1 < count:
            arrive = _exchange_keys(k_TGK, v_TGK, share, group, step + 1)
        yield (share.part - step) % count, k_JGK, v_JGK


def _exchange_keys(
    k_TGK: Tensor, v_TGK: Tensor, share: ContextShare, group: ContextGroup, step: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Post what part p+step sees of the own keys and values, and what this part sees of those of part p-step."""
    count, size = len(share.parts), k_TGK.shape[-1]
    to, source = (share.part + step) % count, (share.part - step) % count
    seen, sees = share.seen_by[to], share.sees[source]
    sends, receives = [], []
    if seen.keys:
        for rank, (lo, hi) in group.sends[to]:
            heads = slice(lo // size, hi // size)
            sends.append((rank, torch.stack([x[:, heads][seen.k_rows] for x in (k_TGK, v_TGK)])))
    if sees.keys:
        for rank, (lo, hi) in group.receives[source]:
            receives.append((rank, k_TGK.new_empty(2, sees.keys, (hi - lo) // size, size)))
    finish = group.channel.exchange(sends, receives, KEYS_TAG)

    def arrive() -> tuple[Tensor, Tensor]:
        finish()
        if not receives:
            return k_TGK[:0], v_TGK[:0]
        messages = [message for _, message in receives]
        k_JGK, v_JGK = (messages[0] if len(messages) == 1 else torch.cat(messages, 2)).unbind()
        return k_JGK, v_JGK

    return arrive


def _give_back(
    dk_JGK: Tensor,
    dv_JGK: Tensor,
    dk_TGK: Tensor,
    dv_TGK: Tensor,
    share: ContextShare,
    group: ContextGroup,
    part: int,
) -> Callable[[], None]:
    """Post the gradients of another part's keys and values to the ranks they came from.

    Those of the own ones come from the part as many steps the other way; they are added up at the end.
    """
    count, size = len(share.parts), dk_TGK.shape[-1]
    source = (2 * share.part - part) % count
    seen = share.seen_by[source]
    sends, receives = [], []
    if dk_JGK.shape[0]:
        for rank, (lo, hi) in group.receives[part]:
            heads = slice(lo // size, hi // size)
            sends.append((rank, torch.stack((dk_JGK[:, heads], dv_JGK[:, heads]))))
    if seen.keys:
        for rank, (lo, hi) in group.sends[source]:
            receives.append((rank, dk_JGK.new_empty(2, seen.keys, (hi - lo) // size, size)))
    arrived = group.channel.exchange(sends, receives, GRADIENTS_TAG)

    def finish() -> None:
        arrived()
        for (_, (lo, hi)), (_, message) in zip(group.sends[source], receives, strict=bool(seen.keys)):
            for total_TGK, addend in zip((dk_TGK, dv_TGK), message, strict=True):
                total_TGK[:, lo // size : hi // size][seen.k_rows] += addend

    return finish
