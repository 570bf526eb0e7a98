"""RMSNorm and Adam by NVIDIA's apex (github.com/NVIDIA/apex), built with its C++ and CUDA extensions.

Written from the library's source (`fused_rms_norm_affine`, and `amp_C.multi_tensor_adam` below `FusedAdam`); neither
has been run here, where there is no GPU. The extensions are what is looked for: the package called apex on the Python
package index is something else and has none.

Shape legend: `T` packed tokens, `D` hidden.
"""

from collections.abc import Callable

from torch import Tensor

from hetero_megatron.layers.kernels.kernel import Kernel, Unfit, needs
from hetero_megatron.layers.kernels.multi_tensor import adam_by
from hetero_megatron.runtime.optimizer import AdamKernel


def _needs(extension: str) -> Unfit:
    return needs(
        cuda=True,
        modules=("apex", extension),
        install="build github.com/NVIDIA/apex with its extensions",
    )


def _load_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        result: Tensor = fused_rms_norm_affine(x_TD, weight_D, weight_D.shape, eps)
        return result

    return rms_norm


def _load_adam() -> AdamKernel:
    from amp_C import multi_tensor_adam

    return adam_by(multi_tensor_adam)


RMS_NORM = Kernel("rms_norm", "apex", _needs("fused_layer_norm_cuda"), _load_rms_norm)
ADAM = Kernel("adam", "apex", _needs("amp_C"), _load_adam)
