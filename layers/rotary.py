"""Rotary position embedding in the half layout of Hugging Face (paper Table 6).

Dim i of a head turns together with dim i + K/2, by position * theta^(-2i/K), or by a scaled frequency.
Shape legend: `T` packed tokens, `C` heads x head size, `H` heads, `K` head size, `J` half of it; local sizes.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.per_batch import PerBatch
from hetero_megatron.layers.rope_scaling import RopeScaling, inverse_frequencies
from hetero_megatron.runtime.batch import Segments

Angles = tuple[Tensor, Tensor]


def rotary_angles(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> PerBatch[Angles]:
    """Cosine and sine per token, one object for all layers of a model.

    Made in FP32, used in the activation's dtype. The cosine is [T, 1, K], both halves; the sine [T, 1, K/2].
    """
    if head_dim % 2:
        raise LayerError(f"rotary embedding turns pairs of dims; head_dim {head_dim} is odd")

    def make(segments: Segments, device: torch.device, dtype: torch.dtype) -> Angles:
        frequencies = inverse_frequencies(head_dim, theta, scaling, device)
        positions_T = segments.positions_T.to(device=device, dtype=torch.float32)
        angles = torch.outer(positions_T, frequencies)[:, None, :]
        cosine = angles.cos()
        return torch.cat((cosine, cosine), -1).to(dtype), angles.sin().to(dtype)

    return PerBatch(make)


class RotaryEmbedding(Layer):
    """Turns the heads of q or k by the position of each token in its document."""

    signature: ClassVar[Signature] = Signature.parse(
        "t (n k); segments -> t (n k)", indivisible=("t", "k"), exact=("n",)
    )

    def __init__(self, head_dim: int, angles: PerBatch[Angles]) -> None:
        super().__init__()
        self.head_dim, self.angles = head_dim, angles

    def forward(self, x_TC: Tensor, segments: Segments) -> Tensor:
        """[T, C] turned head by head.

        Raises:
            LayerError: as many positions as tokens are needed, and whole heads.
        """
        tokens, width = x_TC.shape
        if tokens != segments.positions_T.numel():
            raise LayerError(
                f"rotary embedding: {tokens} tokens, but segments have {segments.positions_T.numel()}"
            )
        if width % self.head_dim:
            raise LayerError(f"rotary embedding: width {width} is no multiple of head_dim {self.head_dim}")
        cos_T1K, sin_T1J = self.angles(segments, x_TC.device, x_TC.dtype)
        turned: Tensor = _Rotate.apply(x_TC, cos_T1K, sin_T1J)
        return turned


def _rotate(x_TC: Tensor, cos_T1K: Tensor, sin_T1J: Tensor, direction: int) -> Tensor:
    x_THK = x_TC.reshape(x_TC.shape[0], -1, cos_T1K.shape[-1])
    turned_THK = x_THK * cos_T1K
    (x_THJ, y_THJ), (turned_x_THJ, turned_y_THJ) = x_THK.chunk(2, -1), turned_THK.chunk(2, -1)
    turned_x_THJ.addcmul_(y_THJ, sin_T1J, value=-direction)
    turned_y_THJ.addcmul_(x_THJ, sin_T1J, value=direction)
    return turned_THK.view(x_TC.shape)


class _Rotate(torch.autograd.Function):
    """A rotation: its gradient is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, cos_T1K: Tensor, sin_T1J: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1K, sin_T1J)
        return _rotate(x_TC, cos_T1K, sin_T1J, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_T1K, sin_T1J = ctx.saved_tensors
        return _rotate(gradients[0], cos_T1K, sin_T1J, -1), None, None
