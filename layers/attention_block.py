"""Attention over blocks of queries and keys with its log-sum-exp, and the gradients of one block (paper Figure 4).

Partial results over different keys of the same queries can be merged by log-sum-exp. Given the merged result and
its log-sum-exp, the gradient of each block is computed on its own.

Shape legend: `Q` queries of all blocks, `J` keys of all blocks, `H` query heads, `G` kv heads, `K` head size;
inside a kernel `B` equal blocks of `L` queries and `M` keys.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hetero_megatron.runtime.context import Pairs

Gradients = tuple[Tensor, Tensor, Tensor]
_FLASH_HEAD_SIZE = 256


def attend(q_QHK: Tensor, k_JGK: Tensor, v_JGK: Tensor, pairs: Pairs, causal: bool) -> tuple[Tensor, Tensor]:
    """Result [Q, H, K] and log-sum-exp [Q, H] (FP32, or FP64) of softmax(q k^T / sqrt(K)) v in every block."""
    if _is_packed(q_QHK):
        return _packed(q_QHK, k_JGK, v_JGK, pairs, causal)
    kernel = _flash_on_cpu if q_QHK.device.type == "cpu" else _plain
    results = [
        kernel(_heads_first(q, blocks), _heads_first(k, blocks), _heads_first(v, blocks), causal)
        for blocks, (q, k, v) in _runs(pairs, (q_QHK,), (k_JGK, v_JGK))
    ]
    outs, sums = zip(*results, strict=True)
    return _joined([_tokens_first(out) for out in outs]), _joined([_tokens_first(lse) for lse in sums])


def attend_backward(
    grad_QHK: Tensor,
    q_QHK: Tensor,
    k_JGK: Tensor,
    v_JGK: Tensor,
    out_QHK: Tensor,
    lse_QH: Tensor,
    pairs: Pairs,
    causal: bool,
) -> Gradients:
    """Gradients of q, k and v by these blocks, given the result and log-sum-exp over all keys of the queries."""
    if _is_packed(q_QHK):
        return _packed_backward(grad_QHK, q_QHK, k_JGK, v_JGK, out_QHK, lse_QH, pairs, causal)
    kernel = _flash_on_cpu_backward if q_QHK.device.type == "cpu" else _plain_backward
    found = []
    for blocks, (grad, q, out, lse, k, v) in _runs(pairs, (grad_QHK, q_QHK, out_QHK, lse_QH), (k_JGK, v_JGK)):
        g, q, k, v, out, lse = (_heads_first(x, blocks) for x in (grad, q, k, v, out, lse))
        found.append([_tokens_first(x) for x in kernel(g, q, k, v, out, lse, causal)])
    dq, dk, dv = (_joined(list(gradients)) for gradients in zip(*found, strict=True))
    return dq, dk, dv


def _runs(
    pairs: Pairs, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Per run of equal blocks: how many, and the rows of every tensor."""
    counts = [blocks for blocks, _, _ in pairs.runs]
    q_sizes = [blocks * q for blocks, q, _ in pairs.runs]
    k_sizes = [blocks * k for blocks, _, k in pairs.runs]
    parts = [x.split(q_sizes) for x in queries] + [x.split(k_sizes) for x in keys]
    return zip(counts, zip(*parts, strict=True), strict=True)


def _heads_first(x: Tensor, blocks: int) -> Tensor:
    """[B, heads, L, ...] from [B * L, heads, ...]."""
    return x.view(blocks, -1, *x.shape[1:]).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flash_on_cpu(q_BHLK: Tensor, k_BGMK: Tensor, v_BGMK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHLK, k_BGMK, v_BGMK, 0.0, causal)
    return out, lse


def _flash_on_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = operator(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _plain(q_BHLK: Tensor, k_BGMK: Tensor, v_BGMK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Where no kernel takes the dtype, such as FP32 on a GPU."""
    repeats = q_BHLK.shape[1] // k_BGMK.shape[1]
    scores = _scores(q_BHLK, k_BGMK, causal)
    lse_BHL = scores.logsumexp(-1)
    weights = (scores - lse_BHL[..., None]).exp()
    out = weights @ _wide(v_BGMK.repeat_interleave(repeats, 1))
    return out.to(q_BHLK.dtype), lse_BHL


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    repeats, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
    weights = (_scores(q, k, causal) - lse[..., None]).exp()
    grad, out = _wide(grad), _wide(out)
    dv = weights.transpose(-1, -2) @ grad
    dp = grad @ _wide(v.repeat_interleave(repeats, 1)).transpose(-1, -2)
    ds = weights * (dp - (grad * out).sum(-1, keepdim=True)) * scale
    dq = ds @ _wide(k.repeat_interleave(repeats, 1))
    dk = ds.transpose(-1, -2) @ _wide(q)
    dk, dv = (x.unflatten(1, (-1, repeats)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq.to(q.dtype), dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    k = _wide(k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    scores = _wide(q) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _is_packed(q_QHK: Tensor) -> bool:
    """Whether FlashAttention takes these heads, all blocks at once."""
    half = q_QHK.dtype in (torch.bfloat16, torch.float16)
    return q_QHK.is_cuda and half and q_QHK.shape[-1] % 8 == 0 and q_QHK.shape[-1] <= _FLASH_HEAD_SIZE


def _longest(pairs: Pairs) -> tuple[int, int]:
    return max(q for _, q, _ in pairs.runs), max(k for _, _, k in pairs.runs)


def _packed(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, causal: bool) -> tuple[Tensor, Tensor]:
    out_QHK, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, pairs.q_borders, pairs.k_borders, *_longest(pairs), 0.0, causal, return_debug_mask=False
    )
    return out_QHK, lse_HQ.transpose(0, 1)


def _packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, causal: bool
) -> Gradients:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout, so no random state
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.transpose(0, 1).contiguous(),
        pairs.q_borders,
        pairs.k_borders,
        *_longest(pairs),
        0.0,
        causal,
        state,
        torch.empty(0, device=q.device),
    )
    return dq, dk, dv
