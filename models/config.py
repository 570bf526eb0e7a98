"""Sizes of a Llama, and what follows from them: parameters and training FLOPs (paper Table 6)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hetero_megatron.errors import ModelError
from hetero_megatron.layers.rope_scaling import RopeScaling
from hetero_megatron.strategy import ModelFacts

WITHOUT_EFFECT = ("init_std", "max_position_embeddings")
"""Fields that do not change what a model with given weights computes."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one Llama; nothing about how it is trained or sharded.

    `head_dim` None means hidden_size / num_attention_heads; `num_query_groups` counts key/value heads. With
    `tie_word_embeddings` the head has no weight of its own: it uses the embedding's. `qkv_bias` adds biases to
    queries, keys and values, `attention_out_bias` to what attention gives the residual stream, `mlp_bias` to all three
    products of the feed-forward block. `sliding_window`: tokens that attention looks back, itself included; documents
    must not be longer, because no window is built. `max_position_embeddings` is only passed on to exports.

    Raises:
        ModelError: a size that is not positive, or heads that do not divide.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            given = value is not None or field.default is not None
            if given and not isinstance(value, (bool, RopeScaling)) and value <= 0:
                raise ModelError(f"{field.name} is {value}; it must be positive")
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise ModelError(
                f"{heads} attention heads cannot share {groups} kv heads: {groups} must divide {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ModelError(
                f"hidden_size {self.hidden_size} is no multiple of {heads} attention heads; "
                "change one, or give head_dim"
            )
        if self.head_size % 2:
            raise ModelError(
                f"head_dim is {self.head_size}; rotary embedding turns pairs of dims, so it must be even"
            )

    @property
    def head_size(self) -> int:
        """Width of one head, given or derived."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of q, all heads together."""
        return self.num_attention_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of k, and of v, all kv heads together."""
        return self.num_query_groups * self.head_size

    @property
    def facts(self) -> ModelFacts:
        """What a strategy has to fit."""
        return ModelFacts(
            self.num_layers,
            self.num_attention_heads,
            self.num_query_groups,
            self.ffn_hidden_size,
            self.vocab_size,
            self.tie_word_embeddings,
        )


def _biases_per_layer(config: LlamaConfig) -> int:
    qkv = config.query_size + 2 * config.kv_size
    mlp = 2 * config.ffn_hidden_size + config.hidden_size
    return config.qkv_bias * qkv + config.attention_out_bias * config.hidden_size + config.mlp_bias * mlp


def _matrix_weights_per_layer(config: LlamaConfig) -> int:
    attention = 2 * config.hidden_size * (config.query_size + config.kv_size)
    return attention + 3 * config.hidden_size * config.ffn_hidden_size


def count_parameters(config: LlamaConfig) -> int:
    """All parameters: embedding, layers with two norms and any biases, final norm, and the head unless it is tied."""
    per_layer = _matrix_weights_per_layer(config) + _biases_per_layer(config) + 2 * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    return (
        config.num_layers * per_layer + tables * config.vocab_size * config.hidden_size + config.hidden_size
    )


def flops_per_token(config: LlamaConfig, seq_length: int) -> int:
    """Training FLOPs per token, forward and backward: 6 per matrix weight, plus causal attention.

    A token of a document of `seq_length` attends to half of it on average. The embedding, a lookup, is free;
    the head is a product, tied or not.
    """
    matrices = config.num_layers * _matrix_weights_per_layer(config) + config.vocab_size * config.hidden_size
    return 6 * matrices + 6 * config.num_layers * config.query_size * seq_length


def differences(first: LlamaConfig, second: LlamaConfig) -> dict[str, tuple[object, object]]:
    """The fields in which two models compute something else, with both values."""
    found: dict[str, tuple[object, object]] = {}
    for field in fields(LlamaConfig):
        name = "head_size" if field.name == "head_dim" else field.name
        pair = (getattr(first, name), getattr(second, name))
        if field.name not in WITHOUT_EFFECT and pair[0] != pair[1]:
            found[field.name] = pair
    return found


def config_to_values(config: LlamaConfig) -> dict[str, Any]:
    """The fields as JSON values, as a checkpoint keeps them under `model` of its payload."""
    return asdict(config)


def config_from_values(values: Mapping[str, Any]) -> LlamaConfig:
    """The model behind `config_to_values`.

    Raises:
        ModelError: a field is missing or unknown, or the fields describe no model.
    """
    known = {field.name for field in fields(LlamaConfig)}
    if unknown := sorted(set(values) - known):
        raise ModelError(f"a model has no field {unknown[0]!r}; a newer version may have saved it")
    scaling = values.get("rope_scaling")
    try:
        return LlamaConfig(**{**values, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except TypeError as error:
        raise ModelError(f"the saved fields describe no model: {error}") from error
