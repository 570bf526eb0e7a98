"""Exports: bit-equal to the import, exact indices, loaded by transformers without anything new or left over."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_megatron.errors import ModelError
from hetero_megatron.models.hf_config import load_json, read_hf_config
from hetero_megatron.models.hf_export import TOKENIZER_FILES, copy_files, write_hf
from hetero_megatron.models.hf_weights import HfWeights
from tests.models.hf_models import MODELS, logits, save

TOKENS = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_an_import_is_bit_equal_and_transformers_computes_the_same(
    name: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source = save(name, tmp_path / "in")
    config = read_hf_config(source)
    weights = HfWeights.open(source, config)
    origin = load_json(source / "config.json")
    out = write_hf(tmp_path / "out", config, weights.read, max_shard_bytes=20_000, origin=origin)
    assert torch.equal(logits(out, TOKENS), logits(source, TOKENS))
    assert read_hf_config(out) == config
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: file for file, tensors in files.items() for key in tensors}
    found = {key: tensor for tensors in files.values() for key, tensor in tensors.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    wanted = load_file(source / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for tensors in files.values():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000 or len(tensors) == 1
    assert not list(out.glob("*.part"))
    kept = load_json(out / "config.json")
    assert {key: kept[key] for key in origin if key in kept} == origin | {
        key: kept[key] for key in ("dtype",)
    }


def test_one_file_when_it_fits_and_bf16_when_asked_for(tmp_path: Path) -> None:
    source = save("kv 2", tmp_path / "in")
    config = read_hf_config(source)
    weights = HfWeights.open(source, config)
    steps: list[tuple[int, int]] = []
    out = write_hf(
        tmp_path / "out",
        config,
        weights.read,
        torch.bfloat16,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    again = HfWeights.open(out, config)
    assert all(torch.equal(again.read(name), weights.read(name).bfloat16()) for name in weights.shapes)
    assert steps[-1] == (2 * 24_736, 2 * 24_736)
    assert len(steps) == len(weights.shapes)
    assert load_json(out / "config.json")["dtype"] == "bfloat16"


def test_a_folder_with_a_model_a_file_in_the_way_and_wrong_tensors_are_refused(tmp_path: Path) -> None:
    source = save("kv 2", tmp_path / "in")
    config = read_hf_config(source)
    read = HfWeights.open(source, config).read
    with pytest.raises(ModelError, match=r"already has a model \(config\.json, model\.safetensors\)"):
        write_hf(source, config, read)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file is no folder that can be written to"):
        write_hf(tmp_path / "file", config, read)
    with pytest.raises(ModelError, match=r"embedding\.weight has shape \[1\], the model makes it \[96, 32\]"):
        write_hf(tmp_path / "out", config, lambda name: torch.zeros(1))
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(ModelError, match="a shard of at most 0 bytes holds nothing"):
        write_hf(tmp_path / "out", config, read, max_shard_bytes=0)
    with pytest.raises(ModelError, match="no architecture of transformers"):
        write_hf(tmp_path / "other", replace(config, attention_out_bias=True), read)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_written_is_named_and_the_rest_of_an_export_is_not_taken_for_a_model(
    tmp_path: Path,
) -> None:
    source = save("kv 2", tmp_path / "in")
    config = read_hf_config(source)
    read = HfWeights.open(source, config).read
    out = tmp_path / "out"
    (out / "model-00002-of-00002.safetensors.part").mkdir(parents=True)
    with pytest.raises(
        ModelError, match=r"model-00002-of-00002\.safetensors\.part cannot be written: Is a dir"
    ):
        write_hf(out, config, read, max_shard_bytes=60_000)
    with pytest.raises(
        ModelError, match=r"without config\.json, the rest of an export that was never finished"
    ):
        write_hf(out, config, read)
    with pytest.raises(
        ModelError, match=r"cannot be written: Not a directory|cannot be written: File exists"
    ):
        copy_files(source, source / "config.json", ("config.json",))


def test_the_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
        (source / name).write_text(name)
    found = copy_files(source, tmp_path / "out", TOKENIZER_FILES)
    assert found == ("tokenizer.json", "generation_config.json")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (tmp_path / "out" / "notes.txt").exists()
    with pytest.raises(ModelError, match="nowhere is no folder"):
        copy_files(tmp_path / "nowhere", tmp_path / "out", TOKENIZER_FILES)
