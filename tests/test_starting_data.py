"""Where in its data a run goes on: the same data, other data, and how long the run is then (case O-54)."""

import json
from pathlib import Path

import pytest
import torch

from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import HeteroError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.hf_names import parameter_shapes
from hetero_megatron.recipe import load_recipe
from hetero_megatron.run import Run, prepare
from hetero_megatron.runtime.checkpoint_write import write_whole

CONFIG = LlamaConfig(1, 16, 32, 2, 1, 257)
RECIPE = """
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, num_query_groups: 1, vocab_size: 257}
strategy: {tp: 1, micro_batches: 1, micro_batch_size: 8}
training: {train_epochs: 1, global_batch_size: 2, seq_length: 16, lr: 1e-3, min_lr: 1e-4, lr_decay_style: linear}
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twenty rows of 16 tokens."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text("x" * 15)
    return folder


def run_of(corpus: Path, *changes: str) -> Run:
    folder = corpus.parent
    (folder / "run.yaml").write_text(RECIPE)
    given = [f"output={folder / 'run'}", f"data.folder={corpus}", *changes]
    return prepare(load_recipe(str(folder / "run.yaml"), given))


def saved(run: Run, iteration: int, sample: int) -> None:
    """A checkpoint of this run."""
    payload = {
        "settings": json.loads(json.dumps(run.settings.to_json())),
        "identity": json.loads(json.dumps(run.identity)),
        "position": sample,
    }
    shapes = parameter_shapes(CONFIG)
    write_whole(run.folder, iteration, payload, ((name, torch.zeros(shapes[name])) for name in shapes))


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_epochs_end_with_their_last_sample_though_steps_become_larger_amid_them(
    corpus: Path, packing: str
) -> None:
    first = run_of(corpus, f"data.packing={packing}")
    assert first.settings.train_iters == 10
    saved(first, 4, 8)
    larger = run_of(corpus, f"data.packing={packing}", "training.global_batch_size=8")
    assert larger.start.position == DataPosition(4, 8)
    assert larger.settings.train_iters == 6, "twelve samples are left, which are two steps"
    assert larger.settings.decay_end == 10, "the saved schedule goes on"
    assert run_of(corpus, f"data.packing={packing}").settings.train_iters == 10


def test_epochs_of_new_data_come_after_the_steps_that_were_made(corpus: Path) -> None:
    saved(run_of(corpus), 10, 20)
    (corpus / "20.txt").write_text("y" * 63)
    with pytest.raises(
        HeteroError, match=r"was saved amid other data: corpus was 20 documents .*new_data: true"
    ):
        run_of(corpus)
    run = run_of(corpus, "checkpoint.new_data=true", "checkpoint.override_lr_schedule=true")
    assert run.start.position == DataPosition(10, 0)
    assert run.settings.train_iters == run.settings.decay_end == 10 + 12


def test_a_run_that_is_started_again_amid_its_new_data_goes_on_there(corpus: Path) -> None:
    saved(run_of(corpus), 10, 20)
    (corpus / "20.txt").write_text("y" * 63)
    saved(run_of(corpus, "checkpoint.new_data=true"), 13, 6)
    run = run_of(corpus, "checkpoint.new_data=true")
    assert run.start.position == DataPosition(13, 6)
    assert run.settings.train_iters == 10 + 12
