"""From settings to documents: lazily, prepared once, or as a stream; and the vocabulary."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data.byte_documents import ByteDocuments
from hetero_megatron.data.documents import Documents, Stream
from hetero_megatron.data.indexed import IndexedDocuments, IndexedWriter
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.prepare import Progress
from hetero_megatron.data.sources import CorpusSettings, SourceSettings, cache_name, open_sources
from hetero_megatron.data.text_stream import TextStream
from hetero_megatron.data.token_check import CheckedDocuments, CheckedStream
from hetero_megatron.data.tokenizer import ByteTokenizer
from hetero_megatron.errors import DataError
from tests.data.tokenizers_made_here import bpe_folder, word_folder

TEXTS = ["one", "", "two ☃", "three", "", "four"]
KEPT = [text for text in TEXTS if text]


def corpus(path: Path, texts: list[str] = TEXTS) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def opened(
    tmp_path: Path, *sources: SourceSettings, vocab_size: int = 300, tokenizer: str = "byte"
) -> list[object]:
    found = open_sources(CorpusSettings(sources, tokenizer), vocab_size, tmp_path / "cache", print)
    return [source.documents for source in found]


def decoded(documents: object) -> list[str]:
    lengths: np.ndarray = documents.lengths  # type: ignore[attr-defined]
    found = [documents.tokens(index) for index in range(len(lengths))]  # type: ignore[attr-defined]
    assert [len(ids) for ids in found] == lengths.tolist()
    return [ByteTokenizer().decode(ids).decode() for ids in found]


def test_files_of_bytes_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.txt").write_bytes(b"\xff")
    [folder, files, library] = opened(
        tmp_path,
        SourceSettings((str(tmp_path / "f"),)),
        SourceSettings((str(tmp_path / "f" / "a.txt"),), "files"),
        SourceSettings(),
    )
    for documents in (folder, files, library):
        assert isinstance(documents, ByteDocuments)
    assert folder.tokens(0).tolist() == [255, 256]  # type: ignore[attr-defined]
    assert not (tmp_path / "cache").exists()


def test_other_text_becomes_tokens_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SourceSettings((corpus(tmp_path / "c.jsonl"),))
    [documents] = opened(tmp_path, source)
    assert decoded(documents) == KEPT
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert {path.suffix for path in files} == {".bin", ".idx", ".json", ".origins"}
    assert all(path.name.startswith("c-") for path in files)
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'c.jsonl'}, in {tmp_path / 'cache'}/c-")
    assert out.endswith(".bin: 4 documents, 23 tokens; left out: 2 empty\n")
    assert decoded(opened(tmp_path, source)[0]) == KEPT
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == files


def test_progress_is_shown_under_a_title(tmp_path: Path) -> None:
    seen: list[object] = []

    def shown(title: str) -> AbstractContextManager[Callable[[Progress], None]]:
        seen.append(title)
        return nullcontext(seen.append)

    path = corpus(tmp_path / "c.jsonl")
    open_sources(CorpusSettings((SourceSettings((path,)),)), 257, tmp_path / "cache", seen.append, shown)
    assert seen[0] == f"{path} to tokens of byte"
    assert isinstance(seen[-2], Progress)


def test_files_under_another_tokenizer_become_tokens(tmp_path: Path) -> None:
    tokenizer = bpe_folder(tmp_path / "t")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.txt").write_text("the cat")
    [documents] = opened(tmp_path, SourceSettings((str(tmp_path / "f"),)), tokenizer=str(tokenizer))
    assert isinstance(documents, IndexedDocuments)
    assert documents.name(0) == str(tmp_path / "f" / "a.txt")
    (tmp_path / "f" / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8: byte 1 of it is FF"):
        opened(tmp_path, SourceSettings((str(tmp_path / "f"),)), tokenizer=str(tokenizer))


def test_weights_pass_through(tmp_path: Path) -> None:
    sources = tuple(SourceSettings((corpus(tmp_path / f"{w}.jsonl"),), weight=w) for w in (0.3, 0.7))
    found = open_sources(CorpusSettings(sources), 257, tmp_path / "cache", print)
    assert [source.weight for source in found] == [0.3, 0.7]


def write(prefix: Path, documents: list[list[int]]) -> str:
    writer = IndexedWriter(prefix, 1000)
    for document in documents:
        writer.add(document)
    writer.finish()
    return str(prefix)


def test_a_tokenized_source_needs_no_tokenizer(tmp_path: Path) -> None:
    source = SourceSettings((write(tmp_path / "c", [[95, 2], [3]]),))
    [documents] = opened(tmp_path, source, vocab_size=96, tokenizer="gone")
    assert isinstance(documents, IndexedDocuments)
    assert documents.lengths.tolist() == [2, 1]
    assert documents.tokens(0).tolist() == [95, 2]


def test_ids_of_large_tokenized_sources_are_checked_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_megatron.data.prepared.SCANNED_BYTES", 7)
    path = write(tmp_path / "c", [[95, 2], [3, 150]])
    [documents] = opened(tmp_path, SourceSettings((path,)), vocab_size=96)
    assert isinstance(documents, CheckedDocuments)
    assert documents.lengths.tolist() == [2, 2]
    assert documents.tokens(0).tolist() == [95, 2]
    with pytest.raises(
        DataError, match=r"token id 150 in document 1 \(.*c\.bin document 1\) is outside .* is 96"
    ):
        documents.tokens(1)


def test_negative_ids_of_a_tokenized_source_are_refused(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "c", 70000)
    writer.add([5])
    writer.add([1, -1])
    writer.finish()
    with pytest.raises(DataError, match=r"token id -1 in document 1 \(.*\) is outside"):
        opened(tmp_path, SourceSettings((str(tmp_path / "c"),)))


def test_a_tokenized_source_is_neither_streamed_nor_joined(tmp_path: Path) -> None:
    path = write(tmp_path / "c", [[1]])
    with pytest.raises(DataError, match="c is tokenized already and read in any order; drop stream"):
        opened(tmp_path, SourceSettings((path,), stream=True))
    with pytest.raises(DataError, match=r"c and 1 more: each \.bin/\.idx pair is a source of its own"):
        opened(tmp_path, SourceSettings((path, path)))


def test_a_stream_gives_the_documents_of_the_source_in_its_order_from_any_place(tmp_path: Path) -> None:
    [stream] = opened(tmp_path, SourceSettings((corpus(tmp_path / "c.jsonl"),), stream=True))
    assert isinstance(stream, CheckedStream)
    for epoch in (0, 1):
        for first in range(6):
            found = [ByteTokenizer().decode(ids).decode() for ids in stream.read(epoch, first)]
            assert found == KEPT[first:]
    assert not (tmp_path / "cache").exists()


def test_a_stream_reads_no_further_than_it_is_asked(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", [*(f"t{n}" for n in range(100)), "\ud800"])
    [stream] = opened(tmp_path, SourceSettings((path,), stream=True))
    assert isinstance(stream, CheckedStream)
    assert len(list(islice(stream.read(0, 0), 64))) == 64
    with pytest.raises(DataError, match="line 101 is not valid Unicode"):
        list(stream.read(0, 0))


def test_a_stream_without_a_document_is_refused(tmp_path: Path) -> None:
    stream = TextStream(LineFiles((corpus(tmp_path / "c.jsonl", ["", ""]),), "json"), ByteTokenizer(), "stop")
    with pytest.raises(
        DataError, match=r"c\.jsonl has no document with text: 0 documents, 0 tokens; left out: 2 empty"
    ):
        list(stream.read(0, 0))


def test_ids_of_a_stream_are_checked(tmp_path: Path) -> None:
    class Foreign:
        def read(self, epoch: int, first: int):  # type: ignore[no-untyped-def]
            yield from (np.array([1, 2]), np.array([3, 96]))

    with pytest.raises(
        DataError, match=r"token id 96 in document 6 of the stream is outside .* vocab_size is 96"
    ):
        list(CheckedStream(Foreign(), 96).read(0, 5))


def test_the_cache_has_readable_names() -> None:
    assert cache_name("data/my corpus*.jsonl", "0123456789abcdef0123") == "my-corpus-0123456789abcdef"
    assert cache_name("/", "0" * 64) == "corpus-0000000000000000"


def test_both_kinds_are_what_training_reads(tmp_path: Path) -> None:
    documents: Documents = IndexedDocuments(write(tmp_path / "c", [[1]]))
    stream: Stream = CheckedStream(TextStream(LineFiles((), "json"), ByteTokenizer(), "stop"), 257)
    assert documents.lengths.tolist() == [1]
    assert stream is not None


def test_a_tokenizer_may_be_smaller_than_the_model_and_not_larger(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", ["w3 w4"])
    for entries in (90, 96):
        name = str(word_folder(tmp_path / str(entries), entries))
        [documents] = opened(tmp_path, SourceSettings((path,)), vocab_size=96, tokenizer=name)
        assert documents.tokens(0).tolist() == [3, 4, 2]  # type: ignore[attr-defined]
    name = str(word_folder(tmp_path / "97", 97))
    with pytest.raises(
        DataError, match="97 has ids up to 96, so it needs model.vocab_size 97 or more, and .* is 96"
    ):
        opened(tmp_path, SourceSettings((path,)), vocab_size=96, tokenizer=name)
