"""What a source's path stands for."""

from pathlib import Path

import pytest

from hetero_megatron.data.formats import format_of, open_files, open_reader
from hetero_megatron.data.indexed import IndexedWriter
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.whole_files import WholeFiles
from hetero_megatron.errors import DataError
from tests.data.test_tables import parquet, saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.jsonl", "b.jsonl", "c.json", "d.txt", "e.txt.gz", "f.md", "sub/g.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "json"),
        ("c.json", "json"),
        ("d.txt", "text"),
        ("e.txt.gz", "text"),
        ("*.jsonl", "json"),
        ("**/*.jsonl", "json"),
        ("[ab].jsonl", "json"),
        ("", "files"),
    ],
)
def test_the_name_tells_the_format(folder: Path, name: str, kind: str) -> None:
    assert format_of(str(folder / name)) == kind


def test_pairs_saved_datasets_and_names_of_the_hub_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = IndexedWriter("c", 10)
    writer.add([1])
    writer.finish()
    assert [format_of(name) for name in ("c", "c.bin", "c.idx")] == ["megatron"] * 3
    saved(tmp_path / "one", {"text": ["a"]})
    saved(tmp_path / "two", {"text": ["a"]}, "train")
    assert [format_of(name) for name in ("one", "two")] == ["saved", "saved"]
    assert [format_of(name) for name in ("allenai/c4", "wikitext")] == ["hub", "hub"]


@pytest.mark.parametrize("name", ["gone.jsonl", "gone/gone/gone", "/gone", "./gone", "../gone/x"])
def test_a_path_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"source {name} does not exist; a source is a folder, a .json"):
        format_of(name)


def test_a_name_that_does_not_tell_is_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"f\.md: its name does not tell what it is; set format to json, parquet, text"
    ):
        format_of(str(folder / "f.md"))
    with pytest.raises(
        DataError, match="matches files of different or unknown kinds; set format, or a narrower"
    ):
        format_of(str(folder / "*"))
    with pytest.raises(DataError, match=r"\*\.gone matches no file"):
        format_of(str(folder / "*.gone"))


def names(reader: object) -> list[str]:
    assert isinstance(reader, LineFiles | WholeFiles)
    return [Path(path).name for path in reader.paths]


def test_files_are_read_in_the_order_of_their_names_or_as_listed(folder: Path) -> None:
    assert names(open_reader([f"{folder}/**/*.jsonl"], "auto")) == ["a.jsonl", "b.jsonl", "g.jsonl"]
    listed = [f"{folder}/b.jsonl", f"{folder}/a.jsonl"]
    assert names(open_reader(listed, "auto")) == ["b.jsonl", "a.jsonl"]
    assert names(open_reader([str(folder)], "json")) == ["a.jsonl", "b.jsonl", "c.json", "g.jsonl"]
    assert names(open_reader([str(folder)], "files", suffixes=(".md",))) == ["f.md"]
    assert names(open_reader([f"{folder}/*.jsonl"], "files")) == ["a.jsonl", "b.jsonl"]
    assert open_files([f"{folder}/f.md", f"{folder}/d.txt"], (".txt",)).names == (f"{folder}/d.txt",)


def test_kinds_are_not_mixed_in_one_source(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl is json and .*d\.txt is text; make two sources of them"):
        open_reader([f"{folder}/a.jsonl", f"{folder}/d.txt"], "auto")
    with pytest.raises(DataError, match="x and y are each a corpus of their own; make two sources of them"):
        open_reader(["x", "y"], "hub")


def test_what_the_format_says_must_be_there(folder: Path) -> None:
    with pytest.raises(DataError, match="has no file that ends in .parquet"):
        open_reader([str(folder)], "parquet")
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist or is not a file"):
        open_reader([f"{folder}/gone.jsonl"], "json")
    with pytest.raises(DataError, match="c is tokenized already; it cannot be read as text"):
        open_reader(["c"], "megatron")


def test_parquet_and_saved_datasets_are_opened(tmp_path: Path) -> None:
    path = parquet(tmp_path / "c.parquet", {"text": ["a"]})
    assert open_reader([path], "auto").unit(0) == "row"
    assert open_reader([saved(tmp_path / "d", {"text": ["a"]})], "auto").unit(0) == "row"
