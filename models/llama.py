"""Llama as written for one device; Reshards mark where a strategy may move activations (paper §4, Table 6).

Shape legend: `T` packed tokens of a micro-batch, `D` hidden, `C` heads x head size, `V` vocabulary.
"""

import math

import torch
from torch import Tensor, nn

from hetero_megatron.layers import (
    Attention,
    Bias,
    CrossEntropy,
    Embedding,
    Linear,
    PerBatch,
    Reshard,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    document_borders,
    initial_value,
    initial_values,
    rotary_angles,
)
from hetero_megatron.layers.bias import plus
from hetero_megatron.layers.rotary import Angles
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.runtime.batch import Segments


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream.

    `entry` belongs to this layer's own stage: across a stage boundary it is the send and receive.
    """

    def __init__(self, config: LlamaConfig, angles: PerBatch[Angles], borders: PerBatch[Tensor]) -> None:
        super().__init__()
        hidden, ffn, std = config.hidden_size, config.ffn_hidden_size, config.init_std
        # What is added to the residual stream starts smaller, so that its variance does not grow with depth.
        out_std = std / math.sqrt(2 * config.num_layers)
        self.entry = Reshard()
        self.attention_norm = RMSNorm(hidden, config.norm_eps)
        self.attention_in = Reshard()
        self.wq = Linear(hidden, config.query_size, std)
        self.wk = Linear(hidden, config.kv_size, std)
        self.wv = Linear(hidden, config.kv_size, std)
        self.rope = RotaryEmbedding(config.head_size, angles)
        self.attention = Attention(config.head_size, borders)
        self.wo = Linear(config.query_size, hidden, out_std)
        self.attention_out = Reshard()
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp_in = Reshard()
        self.gate = Linear(hidden, ffn, std)
        self.up = Linear(hidden, ffn, std)
        self.swiglu = SwiGLU()
        self.down = Linear(ffn, hidden, out_std)
        self.mlp_out = Reshard()

        def bias(wanted: bool, features: int) -> Bias | None:
            return Bias(features) if wanted else None

        self.wq_bias = bias(config.qkv_bias, config.query_size)
        self.wk_bias = bias(config.qkv_bias, config.kv_size)
        self.wv_bias = bias(config.qkv_bias, config.kv_size)
        self.wo_bias = bias(config.attention_out_bias, hidden)
        self.gate_bias = bias(config.mlp_bias, ffn)
        self.up_bias = bias(config.mlp_bias, ffn)
        self.down_bias = bias(config.mlp_bias, hidden)

    def forward(self, x_TD: Tensor, segments: Segments) -> Tensor:
        """The residual stream after this layer."""
        x_TD = self.entry(x_TD)

        h_TD = self.attention_in(self.attention_norm(x_TD))
        q_TC, k_TC = plus(self.wq_bias, self.wq(h_TD)), plus(self.wk_bias, self.wk(h_TD))
        v_TC = plus(self.wv_bias, self.wv(h_TD))
        q_TC, k_TC = self.rope(q_TC, segments), self.rope(k_TC, segments)
        a_TC = self.attention(q_TC, k_TC, v_TC, segments)
        x_TD = x_TD + plus(self.wo_bias, self.attention_out(self.wo(a_TC)))

        h_TD = self.mlp_in(self.mlp_norm(x_TD))
        gate_TF, up_TF = plus(self.gate_bias, self.gate(h_TD)), plus(self.up_bias, self.up(h_TD))
        return x_TD + plus(self.down_bias, self.mlp_out(self.down(self.swiglu(gate_TF, up_TF))))


class Llama(nn.Module):
    """The whole model, its parameters on the meta device until a Session or `materialize` gives them values.

    Called with tokens [T], targets [T] (IGNORE where nothing is predicted) and Segments; gives the loss sum.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        angles = rotary_angles(config.head_size, config.rope_theta, config.rope_scaling)
        borders = document_borders()
        with torch.device("meta"):
            self.embedding = Embedding(config.vocab_size, config.hidden_size, config.init_std)
            self.embedding_out = Reshard()
            self.layers = nn.ModuleList(
                TransformerLayer(config, angles, borders) for _ in range(config.num_layers)
            )
            self.final_entry = Reshard()
            self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head_in = Reshard()
            self.head = Linear(config.hidden_size, config.vocab_size, config.init_std)
            self.loss = CrossEntropy()
        self._tie()

    def _tie(self) -> None:
        """A tied head's weight is the embedding's, one parameter under the embedding's name."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_T: Tensor, targets_T: Tensor, segments: Segments) -> Tensor:
        """Sum of the token losses."""
        loss: Tensor = self.loss(self.logits(tokens_T, segments), targets_T)
        return loss

    def logits(self, tokens_T: Tensor, segments: Segments) -> Tensor:
        """[T, V] before the softmax."""
        x_TD = self.embedding_out(self.embedding(tokens_T))
        for layer in self.layers:
            x_TD = layer(x_TD, segments)
        x_TD = self.head_in(self.final_norm(self.final_entry(x_TD)))
        logits_TV: Tensor = self.head(x_TD)
        return logits_TV

    def materialize(
        self, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "Llama":
        """Give every parameter its first value, whole, on one device; returns the model itself."""
        starts = initial_values(self)
        for name, parameter in list(self.named_parameters()):
            shape = tuple(parameter.shape)
            whole = tuple((0, size) for size in shape)
            value = initial_value(name, starts[name], whole, shape, seed, dtype, device)
            module_name, field = name.rsplit(".", 1)
            setattr(self.get_submodule(module_name), field, nn.Parameter(value))
        self._tie()
        return self


def build_single_device(
    config: LlamaConfig, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Llama:
    """A whole initialised model in one process: the oracle of every distributed test."""
    return Llama(config).materialize(seed, dtype, device)
