"""Attention by flash-attn 2 (github.com/Dao-AILab/flash-attention), all documents in one call.

Written from the library's source, `flash_attn_varlen_func`; it has not been run here, where there is no GPU. It
needs an NVIDIA GPU of compute capability 8.0 (Ampere) and says so itself on an older one. Its backward adds up the
gradient of q in an order that changes from run to run.

Shape legend: `T` packed tokens, `H` heads, `K` head size.
"""

from torch import Tensor

from hetero_megatron.layers.kernels.documents import Attend, all_at_once
from hetero_megatron.layers.kernels.kernel import Kernel, needs


def _load() -> Attend:
    from flash_attn import flash_attn_varlen_func

    def packed(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, borders: Tensor, longest: int) -> Tensor:
        result: Tensor = flash_attn_varlen_func(
            q_THK, k_THK, v_THK, borders, borders, longest, longest, causal=True
        )
        return result

    return all_at_once(packed)


ATTENTION = Kernel(
    "attention",
    "flash-attn",
    needs(
        cuda=True,
        half=True,
        whole_eights=True,
        modules=("flash_attn",),
        newer=("flash-attn", 2),
        install="pip install flash-attn",
    ),
    _load,
)
