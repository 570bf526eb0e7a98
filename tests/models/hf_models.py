"""Tiny models of Hugging Face transformers with weights that are not trivial, saved to folders."""

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

T0 = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# A class of transformers, and what differs from T0.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "kv 2": ("Llama", {}),
    "kv 1, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "kv 4, vocab 97": ("Llama", {"num_key_value_heads": 4, "vocab_size": 97}),
    "llama 3.1 scaling": ("Llama", {"rope_theta": 10000.0, "rope_scaling": LLAMA3}),
    "linear scaling": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "head_dim 16": ("Llama", {"head_dim": 16}),
    "all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "mistral, hidden 30": ("Mistral", {"hidden_size": 30, "head_dim": 8, "sliding_window": 2048}),
    "odd ffn": ("Llama", {"intermediate_size": 62}),
}


def offline() -> Any:
    """transformers, which never asks the hub here; imported on first use because it takes seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def build(name: str) -> Any:
    """A model of MODELS in FP32: normal weights of 0.1, biases too, norms around 1."""
    kind, changes = MODELS[name]
    transformers = offline()
    # transformers writes into the dictionaries that it is given.
    config = getattr(transformers, f"{kind}Config")(**deepcopy({**T0, **changes}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in parameter_name else noise)
    return model


def save(name: str, folder: Path, **options: Any) -> Path:
    """`build(name)` as `save_pretrained` writes it."""
    build(name).save_pretrained(folder, **options)
    return folder


def logits(folder: Path, tokens_T: Tensor) -> Tensor:
    """[T, V] of the model in a folder, as transformers loads it; nothing may be newly initialised or left over."""
    model, loading = offline().AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        found: Tensor = model.eval()(tokens_T[None]).logits[0]
    return found
