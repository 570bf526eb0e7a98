"""Root-mean-square normalisation; the hidden dim stays whole (paper Table 6).

Shape legend: `T` packed tokens (local), `D` hidden.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.initial import Initial
from hetero_megatron.layers.kernels.torch_kernels import rms_norm
from hetero_megatron.layers.layer import Layer


class RMSNorm(Layer):
    """x / rms(x) * weight; under a token split the gradient of the weight is Partial."""

    signature: ClassVar[Signature] = Signature.parse("t h, h -> t h", indivisible=("h",))

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] normalised along D."""
        normalised: Tensor = self.kernel("rms_norm", rms_norm)(x_TD, self.weight, self.eps)
        return normalised

    def initial(self) -> dict[str, Initial]:
        """Ones."""
        return {"weight": ("ones",)}
