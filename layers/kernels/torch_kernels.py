"""RMSNorm and Adam with nothing but torch.

Shape legend: `T` packed tokens, `D` hidden.
"""

import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.layers.kernels.kernel import Kernel, needs
from hetero_megatron.runtime.optimizer import fused_adamw


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """[T, D] normalised along D and scaled."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


RMS_NORM = Kernel("rms_norm", "torch", needs(), lambda: rms_norm)
ADAM = Kernel("adam", "torch", needs(), lambda: fused_adamw)
