"""Blocks of attention: every kernel gives the plain result, log-sum-exp and gradients; blocks merge."""

import math

import pytest
import torch
from torch import Tensor

from hetero_megatron.layers import attention_block
from hetero_megatron.layers.attention_block import attend, attend_backward
from hetero_megatron.runtime.context import Pairs

K = 8
RUNS = {
    "one causal": (((1, 6, 6),), True),
    "causal of two sizes": (((3, 2, 2), (2, 5, 5)), True),
    "full": (((1, 5, 9),), False),
    "full of two sizes": (((2, 1, 4), (1, 7, 2)), False),
}


def pairs_of(runs: tuple[tuple[int, int, int], ...]) -> Pairs:
    q_ends, k_ends = [0], [0]
    for blocks, q, k in runs:
        for _ in range(blocks):
            q_ends.append(q_ends[-1] + q)
            k_ends.append(k_ends[-1] + k)
    borders = (torch.tensor(ends, dtype=torch.int32) for ends in (q_ends, k_ends))
    return Pairs(slice(0, q_ends[-1]), slice(0, k_ends[-1]), runs, q_ends[-1], k_ends[-1], *borders)


def inputs(pairs: Pairs, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((pairs.queries, heads), (pairs.keys, kv_heads), (pairs.keys, kv_heads), (pairs.queries, heads))
    q, k, v, grad = (torch.randn(*shape, K, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, grad


def by_hand(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax block by block with autograd, FP64."""
    outs, sums = [], []
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for at in range(len(pairs.q_borders) - 1):
        rows = slice(int(pairs.q_borders[at]), int(pairs.q_borders[at + 1]))
        keys = slice(int(pairs.k_borders[at]), int(pairs.k_borders[at + 1]))
        scores = torch.einsum("qhk,jhk->hqj", q[rows], k[keys]) / math.sqrt(K)
        if causal:
            scores = scores + torch.full(scores.shape[1:], -math.inf, dtype=q.dtype).triu(1)
        outs.append(torch.einsum("hqj,jhk->qhk", scores.softmax(-1), v[keys]))
        sums.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(sums)


@pytest.mark.parametrize("kernel", ["flash", "plain"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_results_and_gradients_are_those_of_a_softmax(
    name: str, kv_heads: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "plain":
        monkeypatch.setattr(attention_block, "_flash_on_cpu", attention_block._plain)
        monkeypatch.setattr(attention_block, "_flash_on_cpu_backward", attention_block._plain_backward)
    runs, causal = RUNS[name]
    pairs = pairs_of(runs)
    q, k, v, grad = inputs(pairs, 4, kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    right_out, right_lse = by_hand(*leaves, pairs, causal)
    wanted = torch.autograd.grad(right_out, leaves, grad)
    out, lse = attend(q.float(), k.float(), v.float(), pairs, causal)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), right_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    found = attend_backward(grad.float(), q.float(), k.float(), v.float(), out, lse, pairs, causal)
    for gradient, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the packed kernel and plain FP32 need a GPU")
def test_the_gpu_kernels_give_the_cpu_result(dtype: torch.dtype) -> None:
    for runs, causal in RUNS.values():
        pairs = pairs_of(runs)
        q, k, v, grad = (x.to(dtype) for x in inputs(pairs, 4, 2))
        out, lse = attend(q, k, v, pairs, causal)
        wanted = attend_backward(grad, q, k, v, out, lse, pairs, causal)
        there = Pairs(
            pairs.q_rows,
            pairs.k_rows,
            runs,
            pairs.queries,
            pairs.keys,
            pairs.q_borders.cuda(),
            pairs.k_borders.cuda(),
        )
        on_gpu = [x.cuda() for x in (q, k, v)]
        gpu_out, gpu_lse = attend(*on_gpu, there, causal)
        found = attend_backward(grad.cuda(), *on_gpu, gpu_out, gpu_lse, there, causal)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
        for ours, right in zip((gpu_out, gpu_lse, *found), (out, lse, *wanted), strict=True):
            torch.testing.assert_close(ours.cpu(), right, rtol=tolerance, atol=tolerance)
