"""What a run takes its steps from: packing, sources and streams of a recipe, and what is told of them."""

import re
from pathlib import Path

import pytest

from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import RecipeError
from hetero_megatron.recipe import load_recipe
from hetero_megatron.run import Run, prepare
from tests.cli.commands import run as cli
from tests.data.tokenizers_made_here import bpe_folder

RECIPE = """
model: llama_tiny
strategy:
  pipelines:
  - {micro_batches: 2, micro_batch_size: 1, stages: [{ranks: 0, layers: 0-7}]}
  - {micro_batches: 2, micro_batch_size: 1, stages: [{ranks: 1, layers: 0-7}]}
training: {train_iters: 3, global_batch_size: 4, seq_length: 16, lr: 1e-4}
"""


def run_of(tmp_path: Path, *changes: str) -> Run:
    (tmp_path / "run.yaml").write_text(RECIPE)
    return prepare(load_recipe(str(tmp_path / "run.yaml"), [f"output={tmp_path / 'run'}", *changes]))


def lines(path: Path, count: int, length: int = 9) -> Path:
    path.write_text("".join(f'{{"text": "{chr(97 + n % 26) * length}"}}\n' for n in range(count)))
    return path


def test_documents_of_a_recipe_are_dispatched_and_long_ones_told(tmp_path: Path) -> None:
    file = lines(tmp_path / "long.jsonl", 10, 30)
    run = run_of(
        tmp_path,
        f"data.sources=[{{path: {file}}}]",
        "data.packing=documents",
        "data.long_documents=truncate",
        f"evaluation={{data: {{sources: [{{path: {file}}}], packing: documents}}}}",
    )
    told = "long_documents: truncate: 10 of 10 documents have more than 16 tokens; 10 samples, 160 tokens kept, 150 lost"
    assert told in run.notices
    assert any(text.startswith("evaluation.data: long_documents: split: 10 of 10") for text in run.notices)
    assert run.identity["long_documents"] == "truncate"
    batches = [run.data.batches(run.program, rank, DataPosition(), "cpu") for rank in (0, 1)]  # type: ignore[arg-type]
    assert [[len(batch.tokens_T) for batch in own] for own in batches] == [[16, 16], [16, 16]]


def test_the_mixture_is_part_of_what_data_a_run_has(tmp_path: Path) -> None:
    files = [lines(tmp_path / f"{name}.jsonl", 40) for name in "ab"]

    def mixture(weight: float) -> object:
        sources = f"[{{path: {files[0]}, weight: {weight}}}, {{path: {files[1]}, weight: 1}}]"
        return run_of(tmp_path, f"data.sources={sources}").identity["mixture"]

    assert (mixture(1), mixture(3)) == ([1, 1], [3, 1])


def test_a_stream_gives_documents_and_its_buffer_is_part_of_what_data_a_run_has(tmp_path: Path) -> None:
    source = f"data.sources=[{{path: {lines(tmp_path / 'a.jsonl', 40)}, stream: true}}]"
    run = run_of(tmp_path, source, "data.packing=documents", "data.shuffle_buffer=8")
    assert run.identity["shuffle_buffer"] == 8
    (tmp_path / "moved").mkdir()
    for number, same in ((40, True), (41, False)):
        moved = f"data.sources=[{{path: {lines(tmp_path / 'moved/a.jsonl', number)}, stream: true}}]"
        other = run_of(tmp_path, moved, "data.packing=documents", "data.shuffle_buffer=8")
        assert (other.identity == run.identity) is same, "names and sizes of files tell streams apart"
    with run.loader(1, DataPosition()) as loader:
        steps = [loader.next() for _ in range(3)]
    assert [step.samples.count for step in steps if step] == [6, 6, 6]
    with pytest.raises(RecipeError, match="a stream cannot be cut into rows"):
        run_of(tmp_path, source)


def test_held_out_text_becomes_tokens_as_the_text_to_train_on_does(tmp_path: Path) -> None:
    file, tokenizer = lines(tmp_path / "a.jsonl", 40), bpe_folder(tmp_path / "bpe")
    changes = ("model.vocab_size=300", f"data.tokenizer={tokenizer}")
    corpus = f"data.sources=[{{path: {file}}}]"
    run = run_of(tmp_path, *changes, corpus, f"evaluation={{data: {{sources: [{{path: {file}}}]}}}}")
    assert run.held_out is not None
    assert run.held_out.fingerprint == run.data.fingerprint
    refusal = (
        f"data has tokens of tokenizer {tokenizer}, and evaluation.data of byte; a model has one vocabulary"
    )
    with pytest.raises(RecipeError, match=re.escape(refusal)):
        run_of(
            tmp_path,
            *changes,
            corpus,
            f"evaluation={{data: {{tokenizer: byte, sources: [{{path: {file}}}]}}}}",
        )
    assert cli("data", "prepare", str(file), "--output", str(tmp_path / "pair")).code == 0
    refusal = f"{tmp_path / 'pair'} has tokens of tokenizer byte, and {file} of {tokenizer}; a model has one"
    with pytest.raises(RecipeError, match=re.escape(refusal)):
        run_of(tmp_path, *changes, f"data.sources=[{{path: {tmp_path / 'pair'}}}, {{path: {file}}}]")
