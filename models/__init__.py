"""See the README's tree: the package `hetero_megatron.models`."""

if __name__ == "models":
    raise ImportError("import hetero_megatron.models, not models")

from hetero_megatron.models.config import LlamaConfig, count_parameters, flops_per_token
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.models.presets import PRESETS

__all__ = ["PRESETS", "Llama", "LlamaConfig", "build_single_device", "count_parameters", "flops_per_token"]
