"""A run that starts from a checkpoint keeps its model, what shapes do not show too (case O-74)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_megatron.errors import HeteroError
from hetero_megatron.models.config import LlamaConfig, config_to_values, differences
from hetero_megatron.models.hf_export import write_hf
from hetero_megatron.models.hf_names import parameter_shapes
from hetero_megatron.recipe import load_recipe
from hetero_megatron.runtime.checkpoint_write import write_whole
from hetero_megatron.train import prepare
from tests.cli.commands import run

CONFIG = LlamaConfig(2, 32, 64, 4, 2, 257, rope_theta=500000.0, max_position_embeddings=64)
RECIPE = """
model: {model}
strategy: {{tp: 1, micro_batches: 2}}
training: {{train_iters: 3, global_batch_size: 2, seq_length: 32, lr: 1e-4}}
checkpoint: {{load: {load}}}
output: {output}
"""


def prepared(folder: Path, model: str, load: Path) -> object:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(model=model, load=load, output=folder / "new"))
    return prepare(load_recipe(file))


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A run folder made from a Hugging Face folder."""
    shapes = parameter_shapes(CONFIG)
    write_hf(tmp_path / "hf", CONFIG, lambda name: torch.zeros(shapes[name]))
    assert run("convert", "hf-to-run", str(tmp_path / "hf"), str(tmp_path / "run")).code == 0
    return tmp_path / "run"


SIZES = "{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2, vocab_size: 257"


def test_a_converted_model_starts_a_run_that_describes_it_alike(converted: Path, tmp_path: Path) -> None:
    for model in (
        str(tmp_path / "hf"),
        f"{SIZES}, rope_theta: 500000.0}}",
        f"{SIZES}, rope_theta: 5e5, head_dim: 8}}",
    ):
        prepared(tmp_path, model, converted)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "rope_theta was 500000.0 and is 10000.0"),
        (", rope_theta: 500000.0, norm_eps: 1e-6", "norm_eps was 1e-05 and is 1e-06"),
        (
            ", rope_theta: 500000.0, rope_scaling: {rope_type: linear, factor: 2.0}",
            "rope_scaling was None and is ",
        ),
    ],
)
def test_a_recipe_that_says_another_model_of_the_same_shapes_is_refused(
    more: str, told: str, converted: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeteroError, match=re.escape(told)) as caught:
        prepared(tmp_path, f"{SIZES}{more}}}", converted)
    assert "iter_0000000 is of another model: " in str(caught.value)


def test_a_checkpoint_that_does_not_say_its_model_is_compared_by_shapes(tmp_path: Path) -> None:
    shapes = parameter_shapes(CONFIG)
    write_whole(tmp_path / "run", 0, {}, ((name, torch.zeros(shape)) for name, shape in shapes.items()))
    prepared(tmp_path, f"{SIZES}}}", tmp_path / "run")


def test_differences_are_those_of_the_function() -> None:
    assert differences(CONFIG, replace(CONFIG, init_std=1.0, max_position_embeddings=None, head_dim=8)) == {}
    assert differences(CONFIG, replace(CONFIG, head_dim=16, mlp_bias=True)) == {
        "head_dim": (8, 16),
        "mlp_bias": (False, True),
    }
    assert config_to_values(CONFIG)["rope_theta"] == 500000.0
