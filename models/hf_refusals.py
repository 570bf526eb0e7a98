"""Keys of a config.json that ask for another function of the tokens than the one that is built here.

A key that transformers' own class of the model does not know changes nothing there, and passes here too.
"""

import json
from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import ModelError

_OFF = (None, False, 0)
ONE = (None, 1)
# What each of these keys may say, if it is there; anything else is another function of the tokens.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "pretraining_tp": (None, 0, 1),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), _OFF),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_ratio"), ONE),
    **dict.fromkeys(("quantization_config", "compression_config", "auto_map", "clip_qkv"), (None,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "residual_multiplier", "attention_multiplier"), ONE),
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "query_pre_attn_scalar"), ONE),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "attention_chunk_size"), _OFF),
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "use_sliding_window", "scale_embedding"), _OFF
    ),
    **dict.fromkeys(("alibi", "rope_interleave", "rope_interleaved", "parallel_attn"), _OFF),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "num_nextn_predict_layers"), _OFF),
    **dict.fromkeys(("use_bias", "qkv_bias", "add_bias_linear", "is_encoder_decoder", "use_mrope"), _OFF),
}


def refuse_other_functions(raw: Mapping[str, Any]) -> None:
    """Go through all keys.

    Raises:
        ModelError: the first key whose value is not built, with the value and what it may be.
    """
    for key, value in raw.items():
        allowed = _ALLOWED.get(key)
        if allowed is None and ("expert" in key or key.startswith("moe_")):
            allowed = _OFF
        if allowed is not None and not any(value == each for each in allowed):
            may = ", ".join(json.dumps(each) for each in allowed if each is not None)
            raise ModelError(
                f"{key} is {json.dumps(value)}, which is not built" + (f"; it may be {may}" if may else "")
            )


def check_layer_types(raw: Mapping[str, Any], window: object) -> None:
    """All layers must attend alike: over the whole document, or all over a window.

    Raises:
        ModelError: one does not.
    """
    wanted = "full_attention" if window is None else "sliding_attention"
    others = [kind for kind in raw.get("layer_types") or () if kind != wanted]
    if others:
        raise ModelError(
            f"layer_types has {others[0]!r}; layers of several kinds are not built, all must be {wanted}"
        )
