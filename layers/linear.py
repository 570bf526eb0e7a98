"""A matrix product without bias; column- or row-parallel by its weight's annotation alone (paper §4, §5.2).

Shape legend: `T` packed tokens, `I` input features, `O` output features; sizes are local.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.accumulate import Later, gradient_of
from hetero_megatron.layers.initial import Initial
from hetero_megatron.layers.layer import Layer


class Linear(Layer):
    """y = x W^T with W [out, in]: out split gives a split result, in split a Partial one."""

    signature: ClassVar[Signature] = Signature.parse("t i, o i -> t o", linear=True)

    def __init__(self, in_features: int, out_features: int, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, O] from [T, I]."""
        if self.binding is None:
            return F.linear(x_TI, self.weight)
        y_TO: Tensor = _Product.apply(x_TI, self.weight, self.binding.later)
        return y_TO

    def initial(self) -> dict[str, Initial]:
        """Normal with the given standard deviation."""
        return {"weight": ("normal", self.init_std)}


class _Product(torch.autograd.Function):
    """x W^T whose weight gradient is added to the buffer by the product itself, possibly later."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, later: Later | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        # What is saved may come back as another tensor, without the gradient.
        ctx.parameter, ctx.later = weight_OI, later
        return F.linear(x_TI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy_TO,), (x_TI, weight_OI) = gradients, ctx.saved_tensors
        dx_TI = dy_TO.mm(weight_OI) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx_TI, None, None
        sum_OI = gradient_of(ctx.parameter)
        if sum_OI is None or sum_OI.dtype is not dy_TO.dtype:
            return dx_TI, dy_TO.t().mm(x_TI), None
        if ctx.later is None:
            sum_OI.addmm_(dy_TO.t(), x_TI)
        else:
            ctx.later(lambda: sum_OI.addmm_(dy_TO.t(), x_TI))
        return dx_TI, None, None
