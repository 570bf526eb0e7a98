"""`hetero-megatron data`: text to tokens, and statistics."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hetero_megatron.data.indexed import IndexedDocuments
from hetero_megatron.data.prepare import Progress
from hetero_megatron.preparing import preparing_bar
from tests.cli.commands import SMALL, refusal, run
from tests.data.tokenizers_made_here import bpe_folder, word_folder

TEXTS = ["one", "", "two ☃", "x" * 2000]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return "c.jsonl"


@pytest.fixture
def recipe(corpus: str) -> str:
    Path("recipe.yaml").write_text(SMALL + f"data: {{sources: [{{path: {corpus}}}]}}\noutput: out\n")
    return "recipe.yaml"


def test_files_become_a_pair(corpus: str) -> None:
    ended = run("data", "prepare", corpus, "--output", "made/c", "--workers", "2")
    assert ended.code == 0, ended
    assert ended.out == ""
    counts = "3 documents, 2,013 tokens; left out: 1 empty"
    assert ended.err == f"made/c.bin and .idx: {counts}; ids up to 256, for model.vocab_size 257\n"
    assert IndexedDocuments("made/c").lengths.tolist() == [4, 8, 2001]
    again = run("data", "prepare", corpus, "--output", "made/c")
    assert again.code == 0


def test_several_files_become_one_pair_with_a_tokenizer(corpus: str, tmp_path: Path) -> None:
    Path("d.jsonl").write_text('{"body": "the cat"}\n{"body": 5}\n')
    folder = str(bpe_folder(tmp_path / "t"))
    options = ("--tokenizer", folder, "--text-key", "body", "--bad-documents", "skip", "--output", "o")
    ended = run("data", "prepare", "d.jsonl", "d.jsonl", *options)
    assert ended.code == 0, ended
    assert "2 documents" in ended.err
    assert "left out: 2 bad (the first: d.jsonl line 2: column" in ended.err


def test_the_corpora_of_a_recipe_go_into_its_cache_and_the_run_finds_them(recipe: str) -> None:
    assert run("data", "prepare", recipe).code == 0
    made = {path.name: path.stat().st_mtime_ns for path in Path("out/data").iterdir()}
    assert len(made) == 4
    assert run("data", "stats", recipe).code == 0
    assert {path.name: path.stat().st_mtime_ns for path in Path("out/data").iterdir()} == made


def test_held_out_data_is_prepared_too(recipe: str) -> None:
    Path("h.jsonl").write_text('{"text": "held out"}\n')
    held_out = "evaluation={data: {sources: [{path: h.jsonl}]}}"
    assert run("data", "prepare", recipe, held_out, "--set", "data.cache=kept").code == 0
    assert sorted({path.name.split("-")[0] for path in Path("kept").iterdir()}) == ["c", "h"]


def test_an_interrupt_says_that_parts_are_kept(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetero_megatron.data.prepare.run_forked", interrupted)
    for arguments in (("c.jsonl", "--output", "x"), (recipe,)):
        ended = run("data", "prepare", *arguments)
        assert ended.code == 130
        assert "interrupted; finished parts are kept, and the same command goes on from them" in ended.err


def test_what_needs_no_preparation_is_said(recipe: str) -> None:
    ended = run("data", "prepare", recipe, "data={}")
    assert ended.err == "the standard library: read as it is, nothing to prepare\n"


def test_a_file_in_place_of_a_folder_is_refused_with_the_remedy(recipe: str) -> None:
    message = refusal("data", "prepare", recipe, "data=c.jsonl")
    assert message.startswith(
        "recipe.yaml: data.folder: c.jsonl is a file; a folder has a document in each file"
    )
    assert message.endswith("are sources: data: {sources: [{path: c.jsonl}]}")
    assert "data.folder: gone does not exist" in refusal("data", "stats", recipe, "data=gone")


def test_statistics_as_tables(recipe: str) -> None:
    ended = run("data", "stats", recipe)
    assert ended.code == 0, ended
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "c.jsonl 3 2,013 8 2,001 2,001 2,001" in lines
    assert any(line.startswith("up to 512 66.7%") and " 0.6%" in line for line in lines)
    assert any(line.startswith("1K to 2K 33.3%") and " 99.4%" in line for line in lines)
    assert max(map(len, ended.out.splitlines())) <= 80


def test_statistics_as_json_have_a_total_over_several_sources(recipe: str) -> None:
    Path("more.txt").write_text("a\nbc\n")
    sources = "data.sources=[{path: c.jsonl}, {path: more.txt, weight: 0.5}]"
    ended = run("data", "stats", recipe, sources, "--json")
    found = json.loads(ended.out)
    assert [(each["source"], each["documents"], each["tokens"]) for each in found] == [
        ("c.jsonl", 3, 2013),
        ("more.txt", 2, 5),
        ("all sources", 5, 2018),
    ]
    assert found[0]["length"] == {"p50": 8, "p90": 2001, "p99": 2001, "max": 2001}
    assert found[2]["intervals"][0] == {"tokens": "up to 512", "documents": 4, "tokens_in_documents": 17}
    assert sum(each["documents"] for each in found[2]["intervals"]) == 5


def test_statistics_as_a_picture(recipe: str) -> None:
    ended = run("data", "stats", recipe, "--png", "h.png")
    assert ended.code == 0, ended
    assert "histogram: h.png" in ended.out
    assert Path("h.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "--png gone/h.png: the picture cannot be written"
        in run("data", "stats", recipe, "--png", "gone/h.png").err
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert (
        "--png needs the package matplotlib: pip install matplotlib"
        in run("data", "stats", recipe, "--png", "h").err
    )


def test_statistics_of_a_stream_are_refused(recipe: str) -> None:
    ended = run("data", "stats", recipe, "data.sources=[{path: c.jsonl, stream: true}]")
    assert ended.code == 2
    assert "source c.jsonl is a stream, whose documents nobody has counted; drop stream" in ended.err


def test_refusals_name_the_recipe_and_the_section(recipe: str, tmp_path: Path) -> None:
    message = refusal("data", "stats", recipe, "data.sources=[{path: gone.jsonl}]")
    assert message.startswith("recipe.yaml: data: source gone.jsonl does not exist; a source is a folder")
    folder = word_folder(tmp_path / "t", 300)
    message = refusal("data", "prepare", recipe, f"data.tokenizer={folder}")
    assert message.startswith(
        f"recipe.yaml: data.tokenizer: tokenizer {folder} has ids up to 299, so it needs"
    )
    message = refusal("data", "prepare", recipe, f"evaluation={{data: {{tokenizer: {folder}}}}}")
    assert "evaluation.data.tokenizer: tokenizer " in message
    message = refusal("data", "prepare", recipe, "data.tokenizer=gone")
    assert message.startswith("recipe.yaml: data: tokenizer gone does not exist; a tokenizer is byte, ")


def test_options_that_do_not_fit_are_refused(recipe: str) -> None:
    assert "--output PREFIX is missing: where c.jsonl goes as tokens" in refusal("data", "prepare", "c.jsonl")
    assert "drop --output, or name files" in refusal("data", "prepare", recipe, "--output", "x")
    assert "--set changes a recipe" in refusal("data", "prepare", "c.jsonl", "--output", "x", "--set", "a=b")
    wrong = refusal("data", "prepare", "c.jsonl", "--output", "x", "--format", "csv")
    assert (
        wrong == "--format: csv is not known; one of auto, files, json, parquet, text, saved, megatron, hub"
    )
    wrong = refusal("data", "prepare", "c.jsonl", "--output", "x", "--bad-documents", "no")
    assert wrong == "--bad-documents: no is not known; one of stop, skip, replace"


def test_a_terminal_shows_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with preparing_bar("c.jsonl to tokens", console) as show:
        show(Progress(10_000, 20_000, 3000, 40_000))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("c.jsonl to tokens", "10.0/20.0 kB", "3,000 documents, 40,000 tokens"):
        assert text in shown


def test_elsewhere_a_line_is_written_every_half_minute() -> None:
    console, times = Console(file=io.StringIO()), iter([0.0, 10.0, 31.0, 31.0, 32.0])
    with preparing_bar("c.jsonl to tokens", console, lambda: next(times)) as show:
        for done in (1, 2, 3):
            show(Progress(done, 4, 1000 * done, 5))
    assert console.file.getvalue() == "c.jsonl to tokens: 50%, 2,000 documents, 5 tokens\n"  # type: ignore[attr-defined]
