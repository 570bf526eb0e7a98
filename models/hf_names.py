"""Names of parameters in Hugging Face files; both sides store weights [out, in] with rotary halves, so nothing is turned."""

from collections.abc import Mapping

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama

_OUTSIDE = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_IN_LAYERS = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The name in a Hugging Face file: `layers.3.wq_bias.bias` is `model.layers.3.self_attn.q_proj.bias`."""
    module, field = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{_OUTSIDE[module]}.{field}"
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{_IN_LAYERS[part.removesuffix('_bias')]}.{field}"


def parameter_shapes(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """Global shape of every parameter, by our name, in the model's order; a tied head has none."""
    return {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}
