"""A recipe's model from a Hugging Face folder: no number is passed over (case O-74)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_megatron.errors import RecipeError
from hetero_megatron.layers import RopeScaling
from hetero_megatron.models import LlamaConfig
from hetero_megatron.models.hf_config import to_hf
from hetero_megatron.models.hf_export import write_hf
from hetero_megatron.models.hf_names import parameter_shapes
from hetero_megatron.recipe import Recipe, load_recipe

CONFIG = LlamaConfig(2, 32, 64, 4, 2, 257, rope_theta=500000.0, max_position_embeddings=64)
RECIPE = """
model: {}
strategy: {{tp: 1, micro_batches: 2}}
training: {{train_iters: 3, global_batch_size: 2, seq_length: 32, lr: 1e-4}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with weights."""
    shapes = parameter_shapes(CONFIG)
    return write_hf(tmp_path / "hf", CONFIG, lambda name: torch.zeros(shapes[name]))


def load(folder: Path, model: str, *overrides: str) -> Recipe:
    file = folder.parent / "recipe.yaml"
    file.write_text(RECIPE.format(model.replace("FOLDER", str(folder))))
    return load_recipe(file, [text.replace("FOLDER", str(folder)) for text in overrides])


def refused(folder: Path, model: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(folder, model, *overrides)
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("FOLDER", ()),
        ("FOLDER/config.json", ()),
        ("{config: FOLDER}", ()),
        ("{config: FOLDER/config.json, weights: FOLDER}", ()),
        ("{weights: FOLDER}", ()),
        ("{config: FOLDER, rope_theta: 500000.0, head_dim: 8, num_layers: 2}", ()),
        ("llama_tiny", ("model=FOLDER",)),
        ("FOLDER", ("model.num_query_groups=2",)),
        ("FOLDER", ("model.weights=FOLDER",)),
    ],
)
def test_a_config_json_is_the_model_however_it_is_named(
    model: str, overrides: tuple[str, ...], folder: Path
) -> None:
    recipe = load(folder, model, *overrides)
    assert recipe.make_config() == CONFIG
    from_weights = "weights" in model or "weights" in "".join(overrides)
    assert recipe.weights_folder == (folder if from_weights else None)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("{config: FOLDER, rope_theta: 10000.0}", (), "model.rope_theta: 10000.0 here, and 500000.0 in"),
        ("FOLDER", ("model.rope_theta=10000.0",), "model.rope_theta: 10000.0 here, and 500000.0 in FOLDER/c"),
        (
            "FOLDER",
            ("model.head_dim=16",),
            "model.head_dim: 16 here, and 8 in FOLDER/config.json; they contra",
        ),
        ("FOLDER", ("model.qkv_bias=true",), "model.qkv_bias: True here, and False in FOLDER/config.json"),
        ("{config: FOLDER, preset: llama_tiny}", (), "model.preset and model.config both say what the model"),
        (
            "{preset: llama_tiny, weights: FOLDER}",
            (),
            "model.num_layers: 8 here, and 2 in FOLDER/config.json",
        ),
        ("{preset: llama_tny}", (), "there is no model 'llama_tny'; did you mean llama_tiny?"),
        ("FOLDER/nothing", (), "model: FOLDER/nothing: No such file or directory"),
        ("{weights: FOLDER/nothing}", (), "model: FOLDER/nothing: No such file or directory"),
        ("{config: FOLDER, wieghts: FOLDER}", (), "model.wieghts: unknown key; did you mean weights?"),
        (
            "{preset: llama_tiny, rope_scaling: {rope_type: yarn, factor: 2.0}}",
            (),
            "model.rope_scaling: rope_type 'yarn' is not built; known: linear, llama3",
        ),
    ],
)
def test_two_places_that_contradict_each_other_are_refused(
    model: str, overrides: tuple[str, ...], message: str, folder: Path
) -> None:
    assert message in refused(folder, model, *overrides)


def test_what_does_not_change_the_function_may_be_said_otherwise(folder: Path) -> None:
    found = load(folder, "{config: FOLDER, init_std: 0.5, max_position_embeddings: 128}").make_config()
    assert found == replace(CONFIG, init_std=0.5, max_position_embeddings=128)


def test_broken_or_missing_weights_are_refused_when_the_recipe_is_read(folder: Path) -> None:
    assert "model.weights: FOLDER/nothing is no folder" in refused(
        folder, "{config: FOLDER, weights: FOLDER/nothing}"
    )
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = refused(folder, "{weights: FOLDER}")
    assert "model.weights: FOLDER/model.safetensors is no complete safetensors file" in message


def test_a_window_that_rows_exceed_is_refused(folder: Path) -> None:
    config = to_hf(replace(CONFIG, sliding_window=31))
    (folder / "config.json").write_text(json.dumps(config))
    assert "training.seq_length: 32 exceeds the model's sliding_window 31" in refused(folder, "FOLDER")
    assert load(folder, "FOLDER", "training.seq_length=31").make_config().sliding_window == 31


def test_rope_scaling_and_biases_are_keys_of_a_recipe(folder: Path) -> None:
    scaling = "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
    scaling += "original_max_position_embeddings: 1024}"
    model = f"{{preset: llama_tiny, qkv_bias: true, mlp_bias: true, rope_scaling: {scaling}}}"
    found = load(folder, model).make_config()
    assert found.rope_scaling == RopeScaling("llama3", 8, 1, 4, 1024)
    assert (found.qkv_bias, found.attention_out_bias, found.mlp_bias) == (True, False, True)
    assert load(folder, "{preset: llama3.2_1b, rope_scaling: null}").make_config().rope_scaling is None


def test_the_cpu_recipe_goes_on_from_an_export_of_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = Path(__file__).parent.parent / "recipes"
    quickstart = load_recipe(recipes / "quickstart.yaml").make_config()
    shapes = parameter_shapes(quickstart)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="model: runs/quickstart_hf: No such file or directory"):
        load_recipe(recipes / "from_hf_cpu.yaml")
    write_hf("runs/quickstart_hf", quickstart, lambda name: torch.zeros(shapes[name]), context=256)
    recipe = load_recipe(recipes / "from_hf_cpu.yaml")
    assert recipe.make_config() == replace(quickstart, max_position_embeddings=256)
    assert recipe.weights_folder == Path("runs/quickstart_hf")
    assert recipe.make_strategy().ranks == (0, 1, 2, 3)
