"""Hugging Face weights: the same logits, and files that do not agree with each other or with the config (O-59, O-79)."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetero_megatron.annotation import Annotation
from hetero_megatron.errors import ModelError
from hetero_megatron.models import Llama, build_single_device
from hetero_megatron.models.hf_config import read_hf_config
from hetero_megatron.models.hf_export import write_hf
from hetero_megatron.models.hf_names import hf_name
from hetero_megatron.models.hf_weights import HfWeights, hf_initial
from hetero_megatron.runtime.batch import Segments
from hetero_megatron.runtime.state import ParameterSlot
from tests.models.hf_models import MODELS, build, logits, save

TOKENS = torch.randint(0, 96, (1100,), generator=torch.Generator().manual_seed(1))


def loaded(folder: Path) -> Llama:
    config = read_hf_config(folder)
    weights = HfWeights.open(folder, config)
    model = build_single_device(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    wanted = logits(save(name, tmp_path, max_shard_size="20KB"), TOKENS)
    found = loaded(tmp_path).logits(TOKENS, Segments.of_lengths((len(TOKENS),)))
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards and an index."""
    folder = save("kv 2", tmp_path_factory.mktemp("hf") / "good", max_shard_size="40KB")
    assert len(shards(folder)) == 3
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def refused(folder: Path, **changes: object) -> str:
    with pytest.raises(ModelError) as caught:
        HfWeights.open(folder, replace(read_hf_config(folder), **changes))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_missing_empty_cut_or_swapped_shard_is_refused_by_name(folder: Path) -> None:
    first, second, _ = shards(folder)
    whole, other = first.read_bytes(), second.read_bytes()
    first.unlink()
    assert f"{first} is missing; model.safetensors.index.json puts " in refused(folder)
    for broken in (b"", whole[:-1000], whole[:4], whole + b"x" * 1000):
        first.write_bytes(broken)
        assert f"{first} is no complete safetensors file ({len(broken)} bytes)" in refused(folder)
    first.write_bytes(other)
    second.write_bytes(whole)
    assert refused(folder).startswith(f"{first} has no ")


def test_an_index_entry_without_tensor_and_a_tensor_without_entry_are_refused(folder: Path) -> None:
    name, first = "model.layers.0.mlp.up_proj.weight", shards(folder)[0].name
    edit_index(folder, lambda listed: listed.update(ghost=first))
    assert refused(folder) == f"{folder / first} has no ghost, which model.safetensors.index.json puts there"
    edit_index(folder, lambda listed: (listed.pop("ghost"), listed.pop(name)))
    assert f"unexpected tensor {name}; model.safetensors.index.json has none there" in refused(folder)


def test_an_index_that_is_no_index_or_leads_elsewhere_is_refused(folder: Path) -> None:
    edit_index(folder, lambda listed: listed.update(dict.fromkeys(listed, "../secret.safetensors")))
    assert "'../secret.safetensors' is no file beside it" in refused(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "weight_map is no mapping of tensors to files" in refused(folder)


def test_stray_files_beside_an_index_are_passed_over(folder: Path, good: Path) -> None:
    config = read_hf_config(folder)
    wanted = HfWeights.open(good, config)
    write_hf(folder / "other", config, lambda name: 7 + torch.zeros(wanted.shapes[name]))
    shutil.copy(folder / "other" / "model.safetensors", folder / "model.safetensors")
    found = HfWeights.open(folder, config)
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.shapes)


def test_one_file_without_index_is_enough_and_none_is_refused(folder: Path, tmp_path: Path) -> None:
    single = save("kv 2", tmp_path / "single")
    assert [path.name for path in single.glob("*.safetensors")] == ["model.safetensors"]
    found, wanted = (HfWeights.open(each, read_hf_config(each)) for each in (single, folder))
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.shapes)
    (single / "model.safetensors").unlink()
    assert f"{single} has neither model.safetensors.index.json nor model.safetensors" in refused(single)
    with pytest.raises(ModelError, match="nowhere is no folder"):
        HfWeights.open(tmp_path / "nowhere", read_hf_config(folder))


def test_tensors_that_the_config_does_not_have_or_misses_are_refused(tmp_path: Path, folder: Path) -> None:
    biased = save("all biases", tmp_path / "biased")
    text = refused(biased, qkv_bias=False, attention_out_bias=False)
    assert "unexpected tensor model.layers.0.self_attn." in text
    assert text.endswith("; is attention_bias false there?")
    assert refused(biased, mlp_bias=False).endswith("; is mlp_bias false there?")
    assert refused(folder, mlp_bias=True).startswith(f"{folder}: model.layers.0.mlp.")
    assert "unexpected tensor model.layers.1." in refused(folder, num_layers=1)
    missing = refused(folder, num_layers=3)
    assert "model.layers.2.input_layernorm.weight, model.layers.2." in missing
    assert "and 6 more missing from the files" in missing


def test_shapes_other_than_the_configs_are_refused_padded_rows_too(folder: Path) -> None:
    text = refused(folder, vocab_size=95)
    assert "model.embed_tokens.weight has shape [96, 32], config.json makes it [95, 32]" in text
    assert "mlp.gate_proj.weight has shape [64, 32], config.json makes it [60, 32]" in refused(
        folder, ffn_hidden_size=60
    )


def test_values_that_are_no_floating_point_weights_are_refused(tmp_path: Path) -> None:
    build("kv 2").to(torch.float64).save_pretrained(tmp_path)
    assert "model.embed_tokens.weight is F64; weights of F32, BF16, F16 can be read" in refused(tmp_path)


def test_a_tied_model_needs_no_head_and_may_repeat_the_embedding(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tied = save("kv 1, tied", tmp_path / "tied")
    tensors: dict[str, Tensor] = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in tensors
    model = loaded(tied)
    assert model.head.weight is model.embedding.weight
    assert refused(tied, tie_word_embeddings=False).endswith(
        "lm_head.weight missing from the files; tie_word_embeddings is false"
    )
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tied / "model.safetensors")
    assert torch.equal(loaded(tied).head.weight, head)
    head[3, 3] += 1
    save_file(tensors | {"lm_head.weight": head}, tied / "model.safetensors")
    assert "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens" in refused(tied)


def test_rotary_buffers_of_old_files_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save("kv 2", tmp_path) / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(file) | buffer, file)
    HfWeights.open(tmp_path, read_hf_config(tmp_path))


def test_a_part_is_the_slice_of_the_whole_and_may_be_empty(good: Path) -> None:
    config = read_hf_config(good)
    weights = HfWeights.open(good, config)
    for name, bounds in (
        ("layers.1.down.weight", ((0, 32), (7, 40))),
        ("layers.0.wq.weight", ((9, 17), (0, 32))),
        ("final_norm.weight", ((3, 5),)),
        ("head.weight", ((96, 96), (0, 32))),
    ):
        part = tuple(slice(lo, hi) for lo, hi in bounds)
        assert torch.equal(weights.read(name, bounds), weights.read(name)[part])
    slot = ParameterSlot("head.weight", (96, 32), Annotation.on((0,)), ((5, 9), (0, 32)), 0, True)
    first = hf_initial(weights)(slot)
    assert first.dtype is torch.float32
    assert torch.equal(first, weights.read("head.weight")[5:9])


def test_a_part_outside_the_tensor_is_refused(good: Path) -> None:
    weights = HfWeights.open(good, read_hf_config(good))
    for bounds in (((0, 64),), ((0, 32), (0, 1)), ((5, 3),)):
        with pytest.raises(ModelError, match=r"model\.norm\.weight: bounds .* lie outside the shape \(32,\)"):
            weights.read("final_norm.weight", bounds)


def test_names_of_layers_biases_and_tables() -> None:
    assert hf_name("layers.3.wq_bias.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert hf_name("layers.11.mlp_norm.weight") == "model.layers.11.post_attention_layernorm.weight"
    assert hf_name("embedding.weight") == "model.embed_tokens.weight"
    assert hf_name("final_norm.weight") == "model.norm.weight"
    assert hf_name("head.weight") == "lm_head.weight"
