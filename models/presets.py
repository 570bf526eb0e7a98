"""Llama sizes with a name (paper Table 6, Figures 13 and 14)."""

from collections.abc import Mapping
from types import MappingProxyType

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

PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {"llama_tiny": LLAMA_TINY, "llama_7b": LLAMA_7B, "llama_32b": LLAMA_32B, "llama_70b": LLAMA_70B}
)
