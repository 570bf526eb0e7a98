"""A Hugging Face config.json as a LlamaConfig, and back.

Read are both layouts: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).
Written are both at once, so that old and new readers find the same numbers. A key that would change what the model
computes, and that this library does not compute, is refused; keys that transformers' own class passes over pass.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_megatron.errors import ModelError
from hetero_megatron.layers.rope_scaling import RopeScaling
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_refusals import ONE, check_layer_types, refuse_other_functions

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class _Family:
    """One `model_type`: what absent keys mean in transformers, and which of our models it can say."""

    architecture: str
    kv_heads: int | None
    context: int
    window: int | None
    says: Callable[[LlamaConfig], bool]


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM",
        None,
        2048,
        None,
        # transformers refuses a Llama whose heads do not divide its width, even with a head_dim.
        lambda c: (
            c.qkv_bias == c.attention_out_bias
            and c.sliding_window is None
            and c.hidden_size % c.num_attention_heads == 0
        ),
    ),
    "mistral": _Family(
        "MistralForCausalLM",
        8,
        131072,
        4096,
        lambda c: not (c.qkv_bias or c.attention_out_bias or c.mlp_bias),
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        32,
        32768,
        None,
        lambda c: c.qkv_bias and not c.attention_out_bias and not c.mlp_bias and c.sliding_window is None,
    ),
}
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def read_hf_config(path: str | Path) -> LlamaConfig:
    """The model that a config.json, or the folder with one, describes.

    Raises:
        ModelError: the file cannot be read, or describes a model that is not built here; with file, key and value.
    """
    file = config_file(path)
    try:
        return from_hf(load_json(file))
    except ModelError as error:
        message = str(error)
        raise ModelError(message if message.startswith(str(file)) else f"{file}: {message}") from error


def config_file(path: str | Path) -> Path:
    """The config.json that a path means: itself, or the one in the folder."""
    return Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)


def load_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        ModelError: it cannot be read, is cut off, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}; is the file cut off?") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no mapping of keys to values")
    return value


def from_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """The model of a config.json's content.

    Raises:
        ModelError: naming the key and its value.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"model_type {kind!r} is not built; known: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    refuse_other_functions(raw)
    _agreed(raw, "dtype", "torch_dtype")
    sizes = {ours: _whole(raw, theirs) for theirs, ours in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    groups = raw.get("num_key_value_heads", family.kv_heads)
    head_dim = None if raw.get("head_dim") is None else _whole(raw, "head_dim")
    if head_dim is not None and head_dim * heads == sizes["hidden_size"]:
        head_dim = None
    theta, scaling = _rope(raw)
    both, mlp = _switch(raw, "attention_bias"), _switch(raw, "mlp_bias")
    if kind != "llama" and (both or mlp):
        raise ModelError(f"{'attention_bias' if both else 'mlp_bias'} is true; a {kind} has no such switch")
    window = raw.get("sliding_window", family.window) if kind == "mistral" else None
    check_layer_types(raw, window)
    return LlamaConfig(
        **sizes,
        num_query_groups=heads
        if groups is None
        else _whole({"num_key_value_heads": groups}, "num_key_value_heads"),
        head_dim=head_dim,
        rope_theta=theta,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        init_std=_number(raw, "initializer_range", 0.02),
        tie_word_embeddings=_switch(raw, "tie_word_embeddings"),
        rope_scaling=scaling,
        qkv_bias=both or kind == "qwen2",
        attention_out_bias=both,
        mlp_bias=mlp,
        sliding_window=None if window is None else _whole({"sliding_window": window}, "sliding_window"),
        max_position_embeddings=(
            _whole(raw, "max_position_embeddings") if "max_position_embeddings" in raw else family.context
        ),
    )


def to_hf(
    config: LlamaConfig,
    dtype: str = "float32",
    origin: Mapping[str, Any] | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """The content of a config.json for `config`, which the installed transformers loads.

    Args:
        dtype: of the weights beside it: `float32` or `bfloat16`.
        origin: the config.json that the model came from; its other keys, and its model_type where that still
            fits, are kept.
        context: max_position_embeddings where the model does not say.

    Raises:
        ModelError: no architecture of transformers has this model's biases and window.
    """
    origin = origin or {}
    kinds = sorted(FAMILIES, key=lambda kind: kind != origin.get("model_type"))
    kind = next((kind for kind in kinds if FAMILIES[kind].says(config)), None)
    if kind is None:
        raise ModelError(
            f"no architecture of transformers among {', '.join(FAMILIES)} has qkv_bias {config.qkv_bias}, "
            f"attention_out_bias {config.attention_out_bias}, mlp_bias {config.mlp_bias}, sliding_window "
            f"{config.sliding_window} and {config.num_attention_heads} heads on hidden_size {config.hidden_size}"
        )
    family = FAMILIES[kind]
    theta = {"rope_theta": config.rope_theta}
    scaling = None
    if config.rope_scaling is not None:
        scaling = {key: value for key, value in asdict(config.rope_scaling).items() if value is not None}
    kept = dict(origin)
    if kind != origin.get("model_type") or len(origin.get("layer_types") or ()) != config.num_layers:
        kept.pop("layer_types", None)
    found = kept | {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.num_query_groups,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings or context or family.context,
        **theta,
        "rope_scaling": scaling,
        "rope_parameters": theta | (scaling or {"rope_type": "default"}),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind != "qwen2" or config.head_dim is not None:
        found["head_dim"] = config.head_size
    if kind == "llama":
        found |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "mistral":
        found["sliding_window"] = config.sliding_window
    if kind == "qwen2":
        found["use_sliding_window"] = False
    return found


def _agreed(raw: Mapping[str, Any], new: str, old: str) -> Any:
    first, second = raw.get(new), raw.get(old)
    if first is not None and second is not None and first != second:
        raise ModelError(f"{new} {first!r} and {old} {second!r} contradict each other")
    return first if first is not None else second


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from whichever layout has them."""
    new = raw.get("rope_parameters") or {}
    if not isinstance(new, Mapping) or any(isinstance(value, Mapping) for value in new.values()):
        raise ModelError(f"rope_parameters is {json.dumps(new)}; one set of numbers for all layers is needed")
    thetas = {"rope_parameters.rope_theta": new.get("rope_theta"), "rope_theta": raw.get("rope_theta")}
    _agreed(thetas, *thetas)
    theta = next((_number(thetas, key, 0.0) for key in thetas if thetas[key] is not None), 10000.0)
    scalings: dict[str, RopeScaling | None] = {}
    for name, given in (("rope_parameters", new), ("rope_scaling", raw.get("rope_scaling") or {})):
        if given:
            scalings[name] = _scaling(given)
    if len(scalings) == 2 and scalings["rope_parameters"] != scalings["rope_scaling"]:
        raise ModelError(
            f"rope_parameters {json.dumps(new)} and rope_scaling {json.dumps(raw['rope_scaling'])} "
            "contradict each other"
        )
    scaling = next(iter(scalings.values()), None)
    length = raw.get("original_max_position_embeddings")
    if scaling is not None and length not in (None, scaling.original_max_position_embeddings):
        raise ModelError(
            f"original_max_position_embeddings {length!r} contradicts the rope scaling's "
            f"{scaling.original_max_position_embeddings}"
        )
    return theta, scaling


def _scaling(given: object) -> RopeScaling | None:
    if not isinstance(given, Mapping):
        return RopeScaling.read(given)
    rest = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if given.get("partial_rotary_factor") not in ONE:
        raise ModelError(f"partial_rotary_factor is {given['partial_rotary_factor']}, which is not built")
    kind = rest.get("rope_type", rest.get("type", "default"))
    if kind == "default" and rest.get("type", kind) == kind:
        return None
    return RopeScaling.read(rest)


def _whole(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{key} is {json.dumps(value)}; a whole number is needed")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelError(f"{key} is {json.dumps(value)}; a number is needed")
    return float(value)


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key} is {json.dumps(value)}; true or false is needed")
    return bool(value)
