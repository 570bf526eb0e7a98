"""Heterogeneous parallel strategies for Megatron-style Llama training: HSPMD (Hetu v2) on PyTorch."""

__version__ = "0.1.0"
