"""The named sizes are the published ones."""

import pytest

from hetero_megatron.models import PRESETS, Llama, count_parameters


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "ffn", "heads", "groups", "vocab", "billions"),
    [
        ("llama_7b", 32, 4096, 11008, 32, 32, 32000, 6.74),
        ("llama_32b", 60, 6656, 17920, 64, 64, 50304, 32.77),
        ("llama_70b", 80, 8192, 28672, 64, 8, 32000, 68.98),
    ],
)
def test_large_presets_have_the_sizes_of_the_paper(
    name: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, billions: float
) -> None:
    config = PRESETS[name]
    sizes = (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.num_attention_heads)
    assert sizes == (layers, hidden, ffn, heads)
    assert (config.num_query_groups, config.vocab_size) == (groups, vocab)
    assert count_parameters(config) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3.1_8b", 8_030_261_248),
        ("llama3.1_70b", 70_553_706_496),
        ("llama3.2_1b", 1_235_814_400),
        ("llama3.2_3b", 3_212_749_824),
    ],
)
def test_llamas_of_meta_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert count_parameters(PRESETS[name]) == parameters


def test_llamas_of_meta_have_the_published_rotary_numbers_heads_and_contexts() -> None:
    assert PRESETS["llama2_7b"].rope_theta == 10000.0
    for name, factor, context in (
        ("llama3_8b", None, 8192),
        ("llama3.1_8b", 8.0, 131072),
        ("llama3.1_70b", 8.0, 131072),
        ("llama3.2_1b", 32.0, 131072),
        ("llama3.2_3b", 32.0, 131072),
    ):
        config = PRESETS[name]
        assert (config.rope_theta, config.num_query_groups) == (500000.0, 8)
        assert config.head_size == (64 if name == "llama3.2_1b" else 128)
        assert config.max_position_embeddings == context
        assert (config.rope_scaling.factor if config.rope_scaling else None) == factor
        assert config.tie_word_embeddings == name.startswith("llama3.2")


def test_the_quickstart_reads_bytes_and_has_one_to_two_million_parameters() -> None:
    assert PRESETS["llama_tiny"].vocab_size == 257
    assert 1e6 < count_parameters(PRESETS["llama_tiny"]) < 2e6


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_model_of_any_size_is_described_without_memory_and_has_the_counted_parameters(name: str) -> None:
    model = Llama(PRESETS[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(PRESETS[name])
