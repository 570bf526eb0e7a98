"""The gate of the feed-forward block (paper Table 6).

Shape legend: `T` packed tokens, `F` feed-forward; sizes are local.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.layer import Layer


class SwiGLU(Layer):
    """silu(gate) * up, element by element."""

    signature: ClassVar[Signature] = Signature.parse("t f, t f -> t f")

    def forward(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """[T, F] from the two halves of the block."""
        return F.silu(gate_TF) * up_TF
