"""A Llama in a few lines of plain PyTorch, one document at a time: what the model is compared with."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hetero_megatron.models import LlamaConfig


def naive_logits(weights: Mapping[str, Tensor], config: LlamaConfig, tokens_S: Tensor) -> Tensor:
    """[S, V] for one document of S tokens."""
    x = weights["embedding.weight"][tokens_S]
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + _attention(layer, config, _norm(x, layer["attention_norm.weight"], config.norm_eps))
        h = _norm(x, layer["mlp_norm.weight"], config.norm_eps)
        gate = h @ layer["gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ layer["up.weight"].T)) @ layer["down.weight"].T
    return _norm(x, weights["final_norm.weight"], config.norm_eps) @ weights["head.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(layer: Mapping[str, Tensor], config: LlamaConfig, x: Tensor) -> Tensor:
    length, size = x.shape[0], config.head_size
    heads, groups = config.num_attention_heads, config.num_query_groups
    q = _rope((x @ layer["wq.weight"].T).view(length, heads, size), config.rope_theta)
    k = _rope((x @ layer["wk.weight"].T).view(length, groups, size), config.rope_theta)
    v = (x @ layer["wv.weight"].T).view(length, groups, size)
    k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    scores = torch.einsum("qhk,shk->hqs", q, k) / math.sqrt(size)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    values = torch.einsum("hqs,shk->qhk", scores.masked_fill(later, -math.inf).softmax(-1), v)
    return values.reshape(length, heads * size) @ layer["wo.weight"].T


def _rope(x: Tensor, theta: float) -> Tensor:
    """Hugging Face's layout: x * cos + rotate_half(x) * sin."""
    length, _, size = x.shape
    frequency = theta ** (-torch.arange(0, size, 2).float() / size)
    angle = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)[:, None, :]
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()
