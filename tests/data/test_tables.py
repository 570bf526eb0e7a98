"""Tables: rows once and in order whatever the parts, errors by row and column."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.data.records import Counts, Policy, Reader, texts
from hetero_megatron.data.saved import SavedDataset, StreamedDataset, open_hub, open_saved
from hetero_megatron.data.tables import ParquetFiles
from hetero_megatron.errors import DataError


def read(reader: Reader, policy: Policy = "stop", size: int = 2**20) -> tuple[list[str], Counts]:
    counts = Counts()
    return [text for shard in reader.shards(size) for _, text in texts(reader, shard, policy, counts)], counts


def parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 3) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return str(path)


def saved(folder: Path, columns: dict[str, Any], split: str | None = None) -> str:
    import datasets

    made = datasets.Dataset.from_dict(columns)
    (datasets.DatasetDict({split: made}) if split else made).save_to_disk(str(folder))
    return str(folder)


WORDS = [f"word {number} ☃" for number in range(10)]


@pytest.mark.parametrize("size", [1, 200, 10**6])
def test_rows_of_parquet_files_come_once_and_in_order(tmp_path: Path, size: int) -> None:
    paths = tuple(parquet(tmp_path / f"{n}.parquet", {"id": range(10), "text": WORDS}) for n in "ab")
    reader = ParquetFiles(paths)
    assert read(reader, size=size)[0] == WORDS * 2
    assert len(reader.shards(1)) == 8


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_text_may_be_stored_in_several_ways(tmp_path: Path, kind: str) -> None:
    import pyarrow

    column = pyarrow.array(WORDS)
    kinds = {"string": pyarrow.string(), "large_string": pyarrow.large_string(), "binary": pyarrow.binary()}
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kinds[kind])
    assert read(ParquetFiles((parquet(tmp_path / "c.parquet", {"text": column}),)))[0] == WORDS


def test_a_row_without_text_is_named_with_its_columns(tmp_path: Path) -> None:
    texts_ = ["a", "b", "c", "d", None, "f"]
    reader = ParquetFiles((parquet(tmp_path / "c.parquet", {"id": range(6), "text": texts_}),))
    message = (
        r'c\.parquet row 4 \(counted from 0\): column "text" \(text_key\) is null; the columns .*: id, text'
    )
    for size in (1, 10**6):
        with pytest.raises(DataError, match=message):
            read(reader, size=size)
    found, counts = read(reader, "skip")
    assert found == ["a", "b", "c", "d", "f"]
    assert counts.bad == 1


def test_invalid_utf8_in_one_row_is_named_or_replaced(tmp_path: Path) -> None:
    import pyarrow

    column = pyarrow.array([b"good", b"bad \xff", b"good"]).view(pyarrow.string())
    reader = ParquetFiles((parquet(tmp_path / "c.parquet", {"text": column}),))
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\) is not UTF-8: byte 5 of it is FF"):
        read(reader)
    assert read(reader, "replace")[0] == ["good", "bad \ufffd", "good"]


def test_a_table_without_the_column_lists_those_it_has(tmp_path: Path) -> None:
    path = parquet(tmp_path / "c.parquet", {"id": range(10), "body": WORDS})
    with pytest.raises(
        DataError, match=r'no column "text" \(text_key\); columns: id \(int64\), body \(string\)'
    ):
        ParquetFiles((path,))
    with pytest.raises(DataError, match=r'column "id" \(text_key\) is of type int64, not text; columns: id'):
        ParquetFiles((path,), "id")


def test_what_is_no_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    for content in (b"", b"nonsense that is long enough"):
        (tmp_path / "c.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"c\.parquet cannot be read as a parquet file: "):
            ParquetFiles((str(tmp_path / "c.parquet"),))


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = Path(parquet(tmp_path / "c.parquet", {"text": WORDS}))
    reader = ParquetFiles((str(path),))
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"c\.parquet is damaged: "):
        read(reader)


@pytest.mark.parametrize("size", [1, 100, 10**6])
@pytest.mark.parametrize("split", [None, "train"])
def test_a_saved_dataset_is_read_in_order(tmp_path: Path, size: int, split: str | None) -> None:
    reader = open_saved(saved(tmp_path / "d", {"n": range(10), "text": WORDS}, split), "train", "text")
    assert read(reader, size=size)[0] == WORDS
    assert all(Path(path).is_file() for path in reader.paths)


def test_a_saved_dataset_that_was_shuffled_keeps_its_own_order() -> None:
    import datasets

    made = datasets.Dataset.from_dict({"text": WORDS}).shuffle(seed=1)
    assert read(SavedDataset("d", made, "text"))[0] == list(made["text"])


def test_a_row_of_a_saved_dataset_is_named(tmp_path: Path) -> None:
    reader = open_saved(saved(tmp_path / "d", {"text": ["a", "b", None]}), "train", "text")
    for size in (1, 10**6):
        with pytest.raises(
            DataError, match=r'd row 2 \(counted from 0\): column "text" \(text_key\) is null'
        ):
            read(reader, size=size)


def test_a_missing_split_or_column_of_a_saved_dataset_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", {"body": WORDS}, "train")
    with pytest.raises(DataError, match=r"d has no split 'test'; its splits: train"):
        open_saved(path, "test", "body")
    with pytest.raises(DataError, match=r'd: there is no column "text" \(text_key\); columns: body'):
        open_saved(path, "train", "text")


def test_a_folder_that_is_no_saved_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as a saved dataset: "):
        open_saved(str(tmp_path), "train", "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_dataset_of_the_hub_without_a_connection_is_refused(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def offline(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the Hugging Face Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        DataError,
        match=r"hub dataset someone/some \(split train\) cannot be opened: Couldn't reach the Hugging Face Hub; "
        "nothing of this name exists on this machine, .* check the name and the connection",
    ):
        open_hub("someone/some", None, "train", "text", stream)


def test_a_streamed_dataset_is_read_in_order_and_again(tmp_path: Path) -> None:
    import datasets

    path = parquet(tmp_path / "c.parquet", {"text": WORDS})
    made = datasets.load_dataset(
        "parquet", data_files=path, split="train", streaming=True, cache_dir=str(tmp_path)
    )
    reader = StreamedDataset("someone/some", made, "text")
    assert read(reader)[0] == WORDS
    assert read(reader)[0] == WORDS


def test_a_stream_that_breaks_or_has_no_text_says_at_which_row() -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield {"text": "a"}
        yield {"text": 5, "id": 1}
        raise ConnectionError("lost")

    import datasets

    made = datasets.IterableDataset.from_generator(rows)
    reader = StreamedDataset("someone/some", made, "text")
    message = r'some row 1 \(counted from 0\): column "text" \(text_key\) is a number \(5\); .*: text, id'
    with pytest.raises(DataError, match=message):
        read(reader)
    with pytest.raises(DataError, match="someone/some: reading failed after row 1: lost"):
        read(reader, "skip")


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    opening = {
        "datasets": lambda: open_saved(str(tmp_path), "train", "text"),
        "pyarrow": lambda: ParquetFiles((str(tmp_path / "c.parquet"),)),
    }
    with pytest.raises(DataError, match=f"needs the package {package}: pip install {package}"):
        opening[package]()
