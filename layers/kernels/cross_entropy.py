"""The loss sum with the vocabulary split over ranks; torch is the only backend.

transformer-engine's `parallel_cross_entropy` and apex's `SoftmaxCrossEntropyLoss` do not compute this loss. The first
reduces by itself over a process group whose ranks hold equal shards of the vocabulary, as its source says; ours may be
unequal, and are reduced by what the Binding gives. The second knows no vocabulary split at all.

Shape legend: `T` packed tokens, `V` vocabulary; sizes are local.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.layers.kernels.kernel import Kernel, needs
from hetero_megatron.runtime.batch import IGNORE

Reduce = Callable[[Tensor, str], Tensor]


def cross_entropy_sum(logits_TV: Tensor, targets_T: Tensor, first_id: int, reduce: Reduce | None) -> Tensor:
    """FP32 sum of -log softmax(logits)[target] over targets other than IGNORE.

    `first_id` is the id of the first column; `reduce(tensor, "sum" or "max")` works in place over the ranks that
    hold the other columns, None when there are none.
    """
    loss: Tensor = _CrossEntropySum.apply(logits_TV, targets_T, first_id, reduce)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """Keeps one FP32 [T, V], the softmax, and makes the gradient inside it: one backward per forward."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, first_id: int, reduce: Reduce | None
    ) -> Tensor:
        softmax_TV = torch.softmax(logits_TV, -1, dtype=torch.float32)
        largest_T = logits_TV.amax(-1).float()
        # The largest probability is 1 / sum(exp(logit - largest)): no second pass of exponentials is needed.
        total_T = softmax_TV.amax(-1).reciprocal_()
        ignored_T = targets_T == IGNORE
        column_T = targets_T - first_id
        absent_T = ignored_T
        if reduce is not None:
            absent_T = (column_T < 0).logical_or_(column_T >= logits_TV.shape[1]).logical_or_(ignored_T)
        column_T1 = column_T.masked_fill_(absent_T, 0).unsqueeze(1)
        logit_T = logits_TV.gather(1, column_T1).squeeze(1).float()
        share_T = None
        if reduce is None:
            above_T = logit_T.sub_(largest_T)
        else:
            above_T, total_T, share_T = _across_ranks(logit_T, largest_T, total_T, absent_T, reduce)
        ctx.dtype = logits_TV.dtype
        ctx.save_for_backward(softmax_TV, column_T1, ignored_T, absent_T, share_T)
        return total_T.log_().sub_(above_T).masked_fill_(ignored_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, column_T1, ignored_T, absent_T, share_T = ctx.saved_tensors
        weight_T = gradients[0].expand(ignored_T.shape).masked_fill(ignored_T, 0.0)
        scale_T = weight_T if share_T is None else weight_T * share_T
        gradient_TV = softmax_TV.mul_(scale_T.unsqueeze(1))
        gradient_TV.scatter_add_(1, column_T1, weight_T.masked_fill(absent_T, 0.0).neg_().unsqueeze(1))
        return gradient_TV.to(ctx.dtype), None, None, None


def _across_ranks(
    logit_T: Tensor, largest_T: Tensor, total_T: Tensor, absent_T: Tensor, reduce: Reduce
) -> tuple[Tensor, Tensor, Tensor]:
    """Target logit above the largest, sum of exponentials, this rank's share; two all-reduces of [T]."""
    over_all_T = reduce(largest_T.clone(), "max")
    mine_T = total_T * (largest_T - over_all_T).exp_()
    sums_2T = torch.stack(((logit_T - over_all_T).masked_fill_(absent_T, 0.0), mine_T))
    above_T, total_T = reduce(sums_2T, "sum")
    return above_T, total_T, mine_T / total_T


CROSS_ENTROPY = Kernel("cross_entropy", "torch", needs(), lambda: cross_entropy_sum)
