"""Llama sizes with a name: the paper's (Table 6, Figures 13 and 14), and Llama 2 to 3.2 as Meta published them.

The paper's 7B and 70B have the sizes of Llama 2. Presets of Llama 2 and later also know the context they were made for.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from hetero_megatron.layers.rope_scaling import RopeScaling
from hetero_megatron.models.config import LlamaConfig

# Bytes and one end-of-document id: 1.6 million parameters that learn on a laptop within minutes.
LLAMA_TINY = LlamaConfig(
    num_layers=8,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=257,
)
LLAMA_7B = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    vocab_size=32000,
)
LLAMA_32B = LlamaConfig(
    num_layers=60,
    hidden_size=6656,
    ffn_hidden_size=17920,
    num_attention_heads=64,
    num_query_groups=64,
    vocab_size=50304,
)
LLAMA_70B = LlamaConfig(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    vocab_size=32000,
)

LLAMA2_7B = replace(LLAMA_7B, max_position_embeddings=4096)
LLAMA2_13B = replace(
    LLAMA2_7B,
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=13824,
    num_attention_heads=40,
    num_query_groups=40,
)
LLAMA2_70B = replace(LLAMA_70B, max_position_embeddings=4096)
LLAMA3_8B = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
    rope_theta=500000.0,
    max_position_embeddings=8192,
)
LLAMA3_70B = replace(
    LLAMA3_8B, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64
)
_LONG = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
LLAMA31_8B = replace(LLAMA3_8B, rope_scaling=_LONG, max_position_embeddings=131072)
LLAMA31_70B = replace(LLAMA3_70B, rope_scaling=_LONG, max_position_embeddings=131072)
LLAMA32_1B = replace(
    LLAMA31_8B,
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    rope_scaling=replace(_LONG, factor=32.0),
    tie_word_embeddings=True,
)
LLAMA32_3B = replace(LLAMA32_1B, num_layers=28, hidden_size=3072, num_attention_heads=24)

PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "llama_tiny": LLAMA_TINY,
        "llama_7b": LLAMA_7B,
        "llama_32b": LLAMA_32B,
        "llama_70b": LLAMA_70B,
        "llama2_7b": LLAMA2_7B,
        "llama2_13b": LLAMA2_13B,
        "llama2_70b": LLAMA2_70B,
        "llama3_8b": LLAMA3_8B,
        "llama3_70b": LLAMA3_70B,
        "llama3.1_8b": LLAMA31_8B,
        "llama3.1_70b": LLAMA31_70B,
        "llama3.2_1b": LLAMA32_1B,
        "llama3.2_3b": LLAMA32_3B,
    }
)
