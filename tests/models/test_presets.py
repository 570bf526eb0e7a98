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


def test_the_quickstart_reads_bytes_and_has_one_to_two_million_parameters() -> None:
    assert PRESETS["llama_tiny"].vocab_size == 257
    assert 1e6 < count_parameters(PRESETS["llama_tiny"]) < 2e6


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_model_of_any_size_is_described_without_memory_and_has_the_counted_parameters(name: str) -> None:
    model = Llama(PRESETS[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(PRESETS[name])
