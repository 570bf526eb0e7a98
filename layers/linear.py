"""A matrix product without bias; column- or row-parallel by its weight's annotation alone (paper §4, §5.2).

Shape legend: `T` packed tokens, `I` input features, `O` output features; sizes are local.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_megatron.graph.signature import Signature
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
        return F.linear(x_TI, self.weight)

    def initial(self) -> dict[str, Initial]:
        """Normal with the given standard deviation."""
        return {"weight": ("normal", self.init_std)}
