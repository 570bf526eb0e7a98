"""Attention, RMSNorm and Adam by NVIDIA's transformer-engine 2.

Written from the library's source (`DotProductAttention`, the kernels below `ops.RMSNorm`, and `multi_tensor_adam`
below `FusedAdam`); none of it has been run here, where there is no GPU.

Shape legend: `T` packed tokens, `H` heads, `K` head size, `D` hidden.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.layers.kernels.documents import Attend, all_at_once
from hetero_megatron.layers.kernels.kernel import Kernel, Unfit, needs
from hetero_megatron.layers.kernels.multi_tensor import adam_by
from hetero_megatron.runtime.optimizer import AdamKernel


def _needs(half: bool = False) -> Unfit:
    return needs(
        cuda=True,
        half=half,
        whole_eights=half,
        modules=("transformer_engine",),
        newer=("transformer-engine", 2),
        install="pip install transformer-engine[pytorch]",
    )


def _load_attention() -> Attend:
    """`thd` is packed tokens, and the mask is causal inside each document: both are said, nothing is assumed.

    The library has no packed attention in FP32: hence bf16 or fp16.
    """
    from transformer_engine.pytorch import DotProductAttention

    @cache
    def module(heads: int, kv_heads: int, head_dim: int) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = DotProductAttention(
            num_attention_heads=heads,
            kv_channels=head_dim,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        return made

    def packed(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, borders: Tensor, longest: int) -> Tensor:
        _, heads, head_dim = q_THK.shape
        result_TC = module(heads, k_THK.shape[1], head_dim)(
            q_THK,
            k_THK,
            v_THK,
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return result_TC.view(q_THK.shape)

    return all_at_once(packed)


def _load_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    """The library's module owns its weight; ours is a view of a flat buffer, so its two kernels are called directly."""
    # The extension module can be found only once the library itself is imported.
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine_torch import rmsnorm_bwd, rmsnorm_fwd

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
            x_TD = x_TD.contiguous()
            # No output to write into, no quantizer; all multiprocessors; the weight is not centred at zero.
            result_TD, _, inverse_T = rmsnorm_fwd(
                x_TD, weight_D, eps, None, None, TE_DType[x_TD.dtype], 0, False
            )
            ctx.save_for_backward(x_TD, weight_D, inverse_T)
            normalised: Tensor = result_TD
            return normalised

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
            x_TD, weight_D, inverse_T = ctx.saved_tensors
            x_gradient, weight_gradient = rmsnorm_bwd(
                gradients[0].contiguous(), x_TD, inverse_T, weight_D, 0, False
            )
            return x_gradient, weight_gradient.view(weight_D.shape), None

    def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        result: Tensor = Normalise.apply(x_TD, weight_D, eps)
        return result

    return rms_norm


def _load_adam() -> AdamKernel:
    from transformer_engine.pytorch.optimizers import multi_tensor_adam

    return adam_by(multi_tensor_adam)


ATTENTION = Kernel("attention", "transformer-engine", _needs(half=True), _load_attention)
RMS_NORM = Kernel("rms_norm", "transformer-engine", _needs(), _load_rms_norm)
ADAM = Kernel("adam", "transformer-engine", _needs(), _load_adam)
