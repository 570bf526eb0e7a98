"""`convert`: Hugging Face folders to runs and back, through training under a strategy (O-05, O-10, O-29, O-74)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.cli.convert import shard_bytes
from hetero_megatron.errors import CheckpointError, ModelError
from hetero_megatron.models.config import LlamaConfig, config_from_values, config_to_values
from hetero_megatron.models.hf_config import load_json, read_hf_config
from hetero_megatron.models.hf_weights import HfWeights
from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.batch import Segments
from hetero_megatron.runtime.checkpoint import Saver
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.checkpoint_write import write_whole
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot, view
from hetero_megatron.strategy import Strategy
from tests.cli.commands import refusal, run
from tests.distributed.training import (
    T0,
    Outcome,
    assert_parity,
    micro_batch,
    reference,
    sequences,
    stage,
    strategy,
    train,
)
from tests.models.hf_models import LLAMA3, MODELS, logits, save

TOKENS = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(3))


def converted(*arguments: object) -> str:
    ended = run("convert", *map(str, arguments))
    assert ended.code == 0, ended.err
    return ended.out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_zero_steps_gives_back_the_files_bit_by_bit(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "in", max_shard_size="30KB")
    (source / "tokenizer.json").write_text("{}")
    told = converted("hf-to-run", source, tmp_path / "run")
    assert "with tokenizer.json, generation_config.json, config.json" in told
    told = converted("run-to-hf", tmp_path / "run", tmp_path / "out", "--max-shard-size", "20KB")
    assert "of iteration 0 in fp32" in told
    found, wanted = tensors_of(tmp_path / "out"), tensors_of(source)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert read_hf_config(tmp_path / "out") == read_hf_config(source)
    assert load_json(source / "config.json").items() <= load_json(tmp_path / "out" / "config.json").items()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_bf16_files_come_back_as_bf16_unless_told_otherwise(tmp_path: Path) -> None:
    from tests.models.hf_models import build

    build("kv 2").to(torch.bfloat16).save_pretrained(tmp_path / "in")
    converted("hf-to-run", tmp_path / "in", tmp_path / "run")
    assert "in bf16" in converted("run-to-hf", tmp_path / "run", tmp_path / "out")
    found, wanted = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in")
    assert all(tensor.dtype is torch.bfloat16 for tensor in found.values())
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    converted("run-to-hf", tmp_path / "run", tmp_path / "exact", "--dtype", "fp32")
    assert all(torch.equal(t, wanted[key].float()) for key, t in tensors_of(tmp_path / "exact").items())


# Saved by real ranks, exported by one process.

TP2 = strategy((2, 2, [stage("0-1", "0-1")]))
UNEVEN = strategy((4, 1, [stage("0", "0"), stage("1-2", "1-2"), stage("3", "3")]))
STEP = [sequences(4)]


def trained(
    plan: Strategy,
    config: LlamaConfig,
    folder: Path,
    start: SavedState | None = None,
    mark: Callable[[ParameterSlot, Tensor], object] = lambda slot, master: None,
) -> Outcome:
    """One step, then a checkpoint of what `mark(slot, master weights)` makes of this rank's shards."""

    def save_it(session: Session) -> None:
        for slot in session.state.slots:
            mark(slot, view(session.state.master, slot))
        payload = {"model": config_to_values(config), "recipe": {"training": {"seq_length": 64}}}
        Saver(folder, session, asynchronous=False).start(session.iteration, payload)

    return train(plan, STEP, config, collect=save_it, saved=start)


@pytest.mark.parametrize("name", ["kv 4, vocab 97", "kv 1, tied"])
def test_a_trained_import_exports_without_padding_and_a_tied_one_without_head(
    name: str, tmp_path: Path
) -> None:
    source = save(name, tmp_path / "in")
    converted("hf-to-run", source, tmp_path / "run")
    config = read_hf_config(source)
    start = SavedState.open(tmp_path / "run" / "iter_0000000")
    assert config_from_values(start.payload["model"]) == config
    weights = {key: start.read(key) for key in start.names}
    found = trained(TP2, config, tmp_path / "run", start)
    whole = weights | ({"head.weight": weights["embedding.weight"]} if config.tie_word_embeddings else {})
    assert_parity(found, reference(STEP, config, weights=whole))
    assert "of iteration 1" in converted("run-to-hf", tmp_path / "run", tmp_path / "out")
    exported, described = tensors_of(tmp_path / "out"), load_json(tmp_path / "out" / "config.json")
    rows = [config.vocab_size, 32]
    assert list(exported["model.embed_tokens.weight"].shape) == rows
    assert ("lm_head.weight" in exported) == (not config.tie_word_embeddings)
    assert described["vocab_size"] == config.vocab_size
    assert described["tie_word_embeddings"] == config.tie_word_embeddings
    assert described["rope_theta"] == described["rope_parameters"]["rope_theta"] == 500000.0
    assert torch.equal(exported["model.norm.weight"], found.tensors["final_norm.weight"]["parameter"])
    ours = build_single_device(config, 0)
    ours.load_state_dict({key: each["parameter"] for key, each in found.tensors.items()}, strict=False)
    mine = ours.logits(TOKENS, Segments.of_lengths((64,))).detach()
    torch.testing.assert_close(logits(tmp_path / "out", TOKENS), mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [strategy((2, 2, [stage("0", "0-3")])), UNEVEN], ids=["1 stage", "3 stages"])
def test_a_tied_model_is_saved_loaded_and_exported_with_one_table(plan: Strategy, tmp_path: Path) -> None:
    tied = replace(T0, tie_word_embeddings=True)
    found = trained(plan, tied, tmp_path / "run")
    converted("run-to-hf", tmp_path / "run", tmp_path / "out")
    assert load_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    saved = SavedState.open(tmp_path / "run" / "iter_0000001")
    exported = HfWeights.open(tmp_path / "out", tied)
    batch = micro_batch(sequences(4, seed=9))

    def loss_and_logits(weights: Callable[[str], Tensor]) -> tuple[float, Tensor]:
        model = build_single_device(tied, 0)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(weights(key))
            loss = model(batch.tokens_T, batch.targets_T, batch.segments).item() / batch.valid_tokens
            return loss, model.logits(TOKENS, Segments.of_lengths((64,)))

    before, ours = loss_and_logits(lambda key: found.tensors[key]["parameter"])
    assert abs(loss_and_logits(saved.read)[0] - before) < 1e-7
    assert abs(loss_and_logits(exported.read)[0] - before) < 1e-7
    torch.testing.assert_close(logits(tmp_path / "out", TOKENS), ours, rtol=1e-4, atol=1e-5)


def test_layers_keep_their_numbers_through_stages_of_unequal_depth(tmp_path: Path) -> None:
    def mark(slot: ParameterSlot, master: Tensor) -> None:
        if slot.name.startswith("layers.") and "norm" in slot.name:
            master.fill_(int(slot.name.split(".")[1]) + 1)

    trained(UNEVEN, T0, tmp_path / "run", mark=mark)
    converted("run-to-hf", tmp_path / "run", tmp_path / "out", "--iteration", "1")
    exported = tensors_of(tmp_path / "out")
    for layer in range(4):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert (exported[f"model.layers.{layer}.{norm}.weight"] == layer + 1).all()
    assert len(exported) == 4 * 9 + 3
    assert load_json(tmp_path / "out" / "config.json")["max_position_embeddings"] == 64
    config = read_hf_config(tmp_path / "out")
    assert config == replace(T0, max_position_embeddings=64)
    HfWeights.open(tmp_path / "out", config)


@pytest.mark.parametrize("key", ["weights", "config", "load"])
def test_what_a_run_began_with_gives_its_export_tokenizer_dtype_and_other_keys(
    key: str, tmp_path: Path
) -> None:
    source = save("kv 2", tmp_path / "in")
    (source / "tokenizer.json").write_text("{}")
    described = load_json(source / "config.json") | {"eos_token_id": [2, 7], "dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(described))
    recipe: dict[str, Any] = {"model": {key: str(source / "config.json" if key == "config" else source)}}
    if key == "load":
        converted("hf-to-run", source, tmp_path / "first")
        recipe = {"checkpoint": {"load": str(tmp_path / "first")}, "model": {"weights": None}}
    weights = HfWeights.open(source, read_hf_config(source))
    payload = {"model": config_to_values(read_hf_config(source)), "recipe": recipe}
    write_whole(tmp_path / "run", 3, payload, ((name, weights.read(name)) for name in weights.shapes))
    assert "in bf16" in converted("run-to-hf", tmp_path / "run", tmp_path / "out")
    assert load_json(tmp_path / "out" / "config.json")["eos_token_id"] == [2, 7]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_text("")
    converted("run-to-hf", tmp_path / "run", tmp_path / "out2", "--tokenizer", other, "--dtype", "fp32")
    assert (tmp_path / "out2" / "tokenizer.model").exists()
    assert not (tmp_path / "out2" / "tokenizer.json").exists()
    assert load_json(tmp_path / "out2" / "config.json")["dtype"] == "float32"


def test_what_is_not_there_or_does_not_do_is_refused(tmp_path: Path) -> None:
    source = save("kv 2", tmp_path / "in")
    run_folder, out = tmp_path / "run", tmp_path / "out"
    assert f"there is no run folder {run_folder}" in refusal(
        "convert", "run-to-hf", str(run_folder), str(out)
    )
    run_folder.mkdir()
    assert "run has no checkpoint; a run saves one" in refusal(
        "convert", "run-to-hf", str(run_folder), str(out)
    )
    converted("hf-to-run", source, run_folder)
    assert "has checkpoints of iterations 0; name another run folder" in refusal(
        "convert", "hf-to-run", str(source), str(run_folder)
    )
    assert "has no checkpoint of iteration 7; it has iterations 0" in refusal(
        "convert", "run-to-hf", str(run_folder), str(out), "--iteration", "7"
    )
    one = run_folder / "iter_0000000"
    assert "is the checkpoint of another iteration than 7" in refusal(
        "convert", "run-to-hf", str(one), str(out), "--iteration", "7"
    )
    assert "'5 apples' is no size; write one such as 5GB" in refusal(
        "convert", "run-to-hf", str(one), str(out), "--max-shard-size", "5 apples"
    )
    assert not out.exists()
    converted("run-to-hf", one, out)
    assert "already has a model" in refusal("convert", "run-to-hf", str(one), str(out))
    (source / "model.safetensors").unlink()
    assert "has neither model.safetensors.index.json nor model.safetensors" in refusal(
        "convert", "hf-to-run", str(source), str(tmp_path / "other")
    )
    write_whole(tmp_path / "foreign", 3, {"seed": 1}, [("w", torch.zeros(2))])
    assert "does not say its model; its payload has ['seed']" in refusal(
        "convert", "run-to-hf", str(tmp_path / "foreign"), str(tmp_path / "more")
    )
    write_whole(tmp_path / "newer", 3, {"model": {"num_experts": 8}}, [("w", torch.zeros(2))])
    assert "iter_0000003: a model has no field 'num_experts'; a newer version may have" in refusal(
        "convert", "run-to-hf", str(tmp_path / "newer"), str(tmp_path / "more")
    )
    write_whole(tmp_path / "other", 3, {"model": config_to_values(T0)}, [("w", torch.zeros(2))])
    with pytest.raises(CheckpointError, match="is of another model"):
        SavedState.open(tmp_path / "other" / "iter_0000003").check({})
    assert "is of another model" in refusal(
        "convert", "run-to-hf", str(tmp_path / "other"), str(tmp_path / "more")
    )


def test_fields_of_a_model_survive_json_and_are_checked() -> None:
    from hetero_megatron.layers import RopeScaling

    config = replace(T0, rope_scaling=RopeScaling(**LLAMA3), qkv_bias=True)
    assert config_from_values(config_to_values(config)) == config
    with pytest.raises(ModelError, match="the saved fields describe no model: .*num_layers"):
        config_from_values({"hidden_size": 32})


def test_sizes_of_shards() -> None:
    sizes = {"5GB": 5 * 10**9, "20kb": 20_000, "1.5 MB": 1_500_000, "2GiB": 2 * 2**30, "7B": 7}
    assert {text: shard_bytes(text) for text in sizes} == sizes
