"""See the README's tree: the package `hetero_megatron.layers`."""

if __name__ == "layers":
    raise ImportError("import hetero_megatron.layers, not layers")

from hetero_megatron.layers.attention import Attention, document_borders
from hetero_megatron.layers.bias import Bias
from hetero_megatron.layers.cross_entropy import CrossEntropy
from hetero_megatron.layers.embedding import Embedding
from hetero_megatron.layers.initial import Initial, initial_value, initial_values
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.linear import Linear
from hetero_megatron.layers.per_batch import PerBatch
from hetero_megatron.layers.reshard import Reshard
from hetero_megatron.layers.rms_norm import RMSNorm
from hetero_megatron.layers.rope_scaling import RopeScaling
from hetero_megatron.layers.rotary import RotaryEmbedding, rotary_angles
from hetero_megatron.layers.swiglu import SwiGLU

__all__ = [
    "Attention", "Bias", "CrossEntropy", "Embedding", "Initial", "Layer", "Linear", "PerBatch", "RMSNorm",
    "Reshard", "RopeScaling", "RotaryEmbedding", "SwiGLU", "document_borders", "initial_value",
    "initial_values", "rotary_angles",
]  # fmt: skip
