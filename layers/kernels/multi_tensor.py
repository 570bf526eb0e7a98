"""Adam by `multi_tensor_adam`, the kernel that apex and transformer-engine share (one signature, two builds)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.runtime.optimizer import AdamKernel

CHUNK = 2048 * 32  # elements per block of threads, as both libraries choose it
DECOUPLED, BIAS_CORRECTION = 1, 1
# The kernel counts a tensor's elements in 32 bits.
MOST_ELEMENTS = 2**30


def adam_by(multi_tensor_adam: Callable[..., Any]) -> AdamKernel:
    """The Adam of `AdamKernel` by this kernel, which has no divisor: gradients are divided first, in place."""

    def adam(
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        divisor: float,
    ) -> None:
        torch._foreach_div_(list(gradients), divisor)
        lists = [_pieces(tensors) for tensors in (gradients, parameters, exp_avgs, exp_avg_sqs)]
        keep_going = torch.zeros(1, dtype=torch.int32, device=parameters[0].device)
        multi_tensor_adam(
            CHUNK, keep_going, lists, lr, beta1, beta2, eps, step, DECOUPLED, BIAS_CORRECTION, weight_decay
        )

    return adam


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors as pieces that are short enough."""
    return [piece for tensor in tensors for piece in tensor.split(MOST_ELEMENTS)]
