"""Sum of token losses over logits whose vocabulary may be split over ranks (DESIGN decision 6).

Shape legend: `T` packed tokens, `V` vocabulary; sizes are local.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.token_ids import check_ids
from hetero_megatron.runtime.batch import IGNORE
from hetero_megatron.runtime.binding import Binding

Reduce = Callable[[Tensor, str], Tensor]


class CrossEntropy(Layer):
    """FP32 sum of -log softmax(logits)[target] over targets other than IGNORE; 0.0 when there is none.

    The sum, not the mean: the one divisor of a step is the number of valid targets of all pipelines.
    """

    signature: ClassVar[Signature] = Signature.parse("t v, t -> ", reduced=("v",))

    _split: Reduce | None = None
    _first_id: int = 0

    def bind(self, binding: Binding) -> None:
        """Learn this rank's columns [lo, hi) from `bounds['logits']`, and how to reduce over the others."""
        super().bind(binding)
        self._split = binding.reductions.get("v")
        self._first_id = binding.bounds["logits"][-1][0]

    def forward(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """Scalar loss sum, the same on all ranks that share the vocabulary.

        Raises:
            LayerError: logits and targets differ in length, the shard is not as wide as bound, or a target is
                beyond the vocabulary.
        """
        tokens, columns = logits_TV.shape
        if targets_T.shape != (tokens,):
            shape = tuple(targets_T.shape)
            raise LayerError(f"cross-entropy: logits of {tokens} tokens, targets of shape {shape}")
        vocab_size = columns
        if self.binding:
            lo, hi = self.binding.bounds["logits"][-1]
            if hi - lo != columns:
                raise LayerError(f"cross-entropy: {columns} logits per token, this rank has ids [{lo}, {hi})")
            vocab_size = self.binding.full_shapes["logits"][-1]
        check_ids("target id", targets_T, vocab_size)
        loss: Tensor = _CrossEntropySum.apply(logits_TV, targets_T, self._first_id, self._split)
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
