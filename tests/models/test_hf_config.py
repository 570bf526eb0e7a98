"""config.json of transformers 4 and 5: read alike, written so that both read it, refused by key and value."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.errors import ModelError
from hetero_megatron.layers import RopeScaling
from hetero_megatron.layers.rope_scaling import inverse_frequencies
from hetero_megatron.models import PRESETS, LlamaConfig, count_parameters
from hetero_megatron.models.hf_config import from_hf, read_hf_config, to_hf
from tests.models.hf_models import LLAMA3, MODELS, build, offline

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
T0 = LlamaConfig(4, 32, 64, 4, 2, 96, max_position_embeddings=64)
SCALED = replace(T0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 1024))


def test_a_plain_llama_and_what_absent_keys_mean() -> None:
    assert from_hf(LLAMA) == T0
    bare = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "rms_norm_eps")}
    assert from_hf(bare) == replace(T0, num_query_groups=4, norm_eps=1e-6)
    assert from_hf(LLAMA | {"head_dim": 8}) == T0, "the derived size, written out"
    assert from_hf(LLAMA | {"head_dim": 16}).head_size == 16
    assert from_hf(LLAMA | {"hidden_size": 30, "head_dim": 8}).query_size == 32
    with pytest.raises(ModelError, match="hidden_size 30 is no multiple of 4 attention heads"):
        from_hf(LLAMA | {"hidden_size": 30})


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_parameters": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rotary_numbers_are_read_alike_from_both_layouts(layout: dict[str, Any]) -> None:
    assert from_hf(LLAMA | layout) == replace(SCALED, rope_theta=500000.0)


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000.0}},
    ],
)
def test_a_base_of_500000_is_read_from_both_layouts(layout: dict[str, Any]) -> None:
    config = from_hf(LLAMA | layout)
    assert config == replace(T0, rope_theta=500000.0)
    found = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
    wanted = torch.tensor([1.0, 0.03760603, 0.00141421, 0.0000531830])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' is not built; known: llama, mistral, qwen2"),
        ({"hidden_size": "32"}, 'hidden_size is "32"; a whole number is needed'),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps is "small"; a number is needed'),
        ({"attention_bias": 1}, "attention_bias is 1; true or false is needed"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", which is not built; it may be "silu", "swish"'),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, which is not built; it may be 0, 1"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, which is not built; it may be false, 0"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}, which is not built'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not built; it may be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, which is not"),
        ({"num_local_experts": 8}, "num_local_experts is 8, which is not built"),
        ({"n_routed_experts": 64}, "n_routed_experts is 64, which is not built"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not built"),
        ({"logits_scaling": 8}, "logits_scaling is 8, which is not built; it may be 1"),
        ({"use_qk_norm": True}, "use_qk_norm is true, which is not built"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not built"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is true, which is not"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is true; a mistral has no such"),
        ({"rope_scaling": {"rope_type": "foo"}}, "rope_type 'foo' is not built"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not built"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor of rope_type llama3 is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is no mapping"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set of numbers for all layers"),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}},
            "rope_parameters.rope_theta 500000.0 and rope_theta 10000.0 contradict each other",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 32.0}},
            "rope_parameters .*32.0.* and rope_scaling .*8.0.* contradict each other",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters .*default.* and rope_scaling .*llama3.* contradict each other",
        ),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8192},
            "original_max_position_embeddings 8192 contradicts the rope scaling's 1024",
        ),
        (
            {"dtype": "float32", "torch_dtype": "bfloat16"},
            "dtype 'float32' and torch_dtype 'bfloat16' contra",
        ),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 kv heads"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(LLAMA | change)


def test_keys_that_transformers_passes_over_pass_here_too() -> None:
    others = {
        "bos_token_id": 1,
        "use_cache": True,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "attention_dropout": 0.0,
        "quantization_config": None,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "made_up": [1, 2],
    }
    assert from_hf(LLAMA | others) == T0


def test_a_mistral_has_a_window_unless_it_says_null_and_a_qwen2_has_three_biases() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert from_hf(mistral) == replace(T0, sliding_window=4096)
    assert from_hf(mistral | {"sliding_window": None}) == T0
    assert from_hf(mistral | {"layer_types": ["sliding_attention"] * 4}).sliding_window == 4096
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert from_hf(qwen) == replace(T0, qkv_bias=True)
    assert from_hf(LLAMA | {"attention_bias": True}) == replace(T0, qkv_bias=True, attention_out_bias=True)


# As their makers published them, shortened by what says nothing of sizes or functions.
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_25_05B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("published", "parameters"),
    [(LLAMA_32_1B, 1_235_814_400), (MISTRAL_7B, 7_241_732_096), (QWEN_25_05B, 494_032_768)],
)
def test_published_files_describe_models_of_the_published_size(
    published: dict[str, Any], parameters: int
) -> None:
    config = from_hf(published)
    assert count_parameters(config) == parameters
    written = to_hf(config, origin=published)
    assert from_hf(written) == config
    for key, value in published.items():
        assert key == "torch_dtype" or written[key] == value, key


def test_the_published_llama_32_is_its_preset() -> None:
    assert from_hf(LLAMA_32_1B) == PRESETS["llama3.2_1b"]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written_as_it_reads_its_own(name: str, tmp_path: Path) -> None:
    theirs = build(name).config
    theirs.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    assert config == read_hf_config(tmp_path / "config.json")
    written = to_hf(config)
    assert from_hf(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = offline().AutoConfig.from_pretrained(tmp_path)
    ours, own = again.to_dict(), theirs.to_dict()
    for key in own:
        # Where transformers does not say it writes null or leaves the key out.
        if key not in (
            "_name_or_path",
            "architectures",
            "dtype",
            "sliding_window",
            "head_dim",
            "pad_token_id",
        ):
            assert ours[key] == own[key], key
    assert again.rope_parameters == theirs.rope_parameters


def test_other_keys_of_the_origin_and_its_kind_are_kept_while_they_fit() -> None:
    origin = LLAMA | {"model_type": "mistral", "sliding_window": None, "eos_token_id": [2, 7], "made_up": 3}
    written = to_hf(from_hf(origin), "bfloat16", origin)
    assert written["model_type"] == "mistral"
    assert (written["eos_token_id"], written["made_up"]) == ([2, 7], 3)
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    biased = to_hf(replace(T0, qkv_bias=True), origin=origin)
    assert (biased["model_type"], biased["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert to_hf(replace(T0, max_position_embeddings=None), context=256)["max_position_embeddings"] == 256
    with pytest.raises(ModelError, match="no architecture of transformers .* mlp_bias True"):
        to_hf(replace(T0, qkv_bias=True, mlp_bias=True))


def test_a_file_that_is_missing_cut_off_or_no_mapping_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        read_hf_config(tmp_path)
    file = tmp_path / "config.json"
    for text, message in (
        ('{"model_type": ', r"config\.json is not JSON: .*; is the file cut off\?"),
        ("[1]", r"config\.json holds no mapping"),
        (json.dumps(LLAMA | {"vocab_size": 0}), r"config\.json: vocab_size is 0; it must be positive"),
    ):
        file.write_text(text)
        with pytest.raises(ModelError, match=message):
            read_hf_config(tmp_path)
