"""A vector that is added to every token's features, as its own operator (paper §5.2).

Behind a column-parallel product it is split as the product's result is. Behind a row-parallel one it stands after
the Reshard that completes the sum: its rule refuses a Partial operand, to which it would be added once per rank.
Shape legend: `T` packed tokens, `F` features; sizes are local.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.initial import Initial
from hetero_megatron.layers.layer import Layer


class Bias(Layer):
    """x + bias; under a token split the gradient of the bias is Partial."""

    signature: ClassVar[Signature] = Signature.parse("t f, f -> t f", additive=True)

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(features))

    def forward(self, x_TF: Tensor) -> Tensor:
        """[T, F] from [T, F]."""
        return x_TF + self.bias

    def initial(self) -> dict[str, Initial]:
        """Zeros."""
        return {"bias": ("zeros",)}


def plus(bias: Bias | None, x_TF: Tensor) -> Tensor:
    """`x_TF` with the bias, where the model has one; without, the graph has no node for it."""
    return x_TF if bias is None else bias(x_TF)
