"""Packed rows: a view of one endless token stream."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.data.byte_documents import ByteDocuments
from hetero_megatron.data.corpus import Files
from hetero_megatron.data.order import epoch_order
from hetero_megatron.data.piece import KEPT_DOCUMENTS, Piece
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE


@dataclass
class Memory:
    """A corpus in memory that notes which documents were read."""

    documents: tuple[bytes, ...]
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.documents)

    def name(self, index: int) -> str:
        return f"document {index}"

    def size(self, index: int) -> int:
        return len(self.documents[index])

    def read(self, index: int) -> bytes:
        self.reads.append(index)
        return self.documents[index]

    def read_part(self, index: int, start: int, stop: int) -> bytes:
        self.reads.append(index)
        return self.documents[index][start:stop]


def stream_of(corpus: Memory, seed: int, passes: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Tokens, targets and (occurrence, document) of every token, written out the slow way."""
    tokens: list[int] = []
    targets: list[int] = []
    owners: list[tuple[int, int]] = []
    for epoch in range(passes):
        for document in epoch_order(len(corpus), seed, epoch).tolist():
            own = [*corpus.documents[document], 256]
            owners += [(len(tokens), document)] * len(own)
            tokens += own
            targets += [*own[1:], IGNORE]
    return tokens, targets, owners


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.binary(min_size=0, max_size=12), min_size=1, max_size=6),
    seq_length=st.integers(1, 17),
    seed=st.integers(0, 2**40),
)
def test_rows_are_windows_of_the_stream_whatever_the_lengths(
    documents: list[bytes], seq_length: int, seed: int
) -> None:
    corpus = Memory(tuple(documents))
    rows = PackedRows(ByteDocuments(corpus), seed, seq_length)
    tokens, targets, owners = stream_of(corpus, seed, passes=3)
    for number in range(len(tokens) // seq_length):
        window = slice(number * seq_length, (number + 1) * seq_length)
        pieces = rows.row(number)
        assert np.concatenate([piece.tokens_T for piece in pieces]).tolist() == tokens[window]
        assert np.concatenate([piece.targets_T for piece in pieces]).tolist() == targets[window]
        assert len(pieces) == len(set(owners[window]))
        assert all(len(piece) for piece in pieces)


def test_a_target_crosses_the_row_border_but_not_the_document() -> None:
    rows = PackedRows(ByteDocuments(Memory((b"abcdef",))), seed=0, seq_length=4)
    first, second = rows.row(0), rows.row(1)
    assert [piece.tokens_T.tolist() for piece in first] == [[97, 98, 99, 100]]
    assert [piece.targets_T.tolist() for piece in first] == [[98, 99, 100, 101]]
    assert [piece.tokens_T.tolist() for piece in second] == [[101, 102, 256], [97]]
    assert [piece.targets_T.tolist() for piece in second] == [[102, 256, IGNORE], [98]]


def test_a_row_reads_only_the_documents_it_touches() -> None:
    corpus = Memory(tuple(bytes([index]) * 100 for index in range(20)))
    rows = PackedRows(ByteDocuments(corpus), seed=5, seq_length=64)
    assert corpus.reads == []
    rows.row(13)
    _, _, owners = stream_of(corpus, 5, passes=1)
    assert corpus.reads == list(dict.fromkeys(document for _, document in owners[13 * 64 : 14 * 64]))


def test_a_row_does_not_depend_on_which_rows_were_asked_before() -> None:
    corpus = Memory(tuple(bytes([index]) * (7 * index + 3) for index in range(30)))
    asked = PackedRows(ByteDocuments(corpus), seed=1, seq_length=50)
    for number in (90, 3, 200, 17):
        fresh = PackedRows(ByteDocuments(corpus), seed=1, seq_length=50)
        for ours, theirs in zip(asked.row(number), fresh.row(number), strict=True):
            assert ours.tokens_T.tolist() == theirs.tokens_T.tolist()
            assert ours.document == theirs.document


def test_recently_used_documents_are_kept_and_no_more() -> None:
    corpus = Memory(tuple(bytes([index]) for index in range(KEPT_DOCUMENTS + 10)))
    rows = PackedRows(ByteDocuments(corpus), seed=0, seq_length=2)
    rows.row(0)
    rows.row(0)
    assert len(corpus.reads) == 1
    for number in range(len(corpus)):
        rows.row(number)
    rows.row(0)
    assert len(corpus.reads) == len(corpus) + 1


def test_samples_are_the_rows_of_each_pass_in_shuffled_order() -> None:
    corpus = Memory(tuple(bytes([index]) * 9 for index in range(12)))
    rows = PackedRows(ByteDocuments(corpus), seed=3, seq_length=7)
    assert rows.rows_per_pass == 120 // 7

    def texts(pieces: tuple[Piece, ...]) -> list[list[int]]:
        return [piece.tokens_T.tolist() for piece in pieces]

    for first in (0, rows.rows_per_pass):
        numbers = range(first, first + rows.rows_per_pass)
        samples = [texts(rows.sample(number)) for number in numbers]
        in_order = [texts(rows.row(number)) for number in numbers]
        assert samples != in_order
        assert sorted(samples) == sorted(in_order)


def test_a_corpus_shorter_than_a_row_still_has_samples() -> None:
    rows = PackedRows(ByteDocuments(Memory((b"ab",))), seed=0, seq_length=8)
    assert [sum(map(len, rows.sample(number))) for number in range(3)] == [8, 8, 8]


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(DataError, match="sample -1 does not exist; samples are counted from 0"):
        PackedRows(ByteDocuments(Memory((b"a",))), 0, 4).sample(-1)


def test_a_negative_row_is_refused() -> None:
    with pytest.raises(DataError, match="row -1 does not exist; rows are counted from 0"):
        PackedRows(ByteDocuments(Memory((b"a",))), 0, 4).row(-1)


def test_rows_without_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="seq_length is 0; a row holds 1 token or more"):
        PackedRows(ByteDocuments(Memory((b"a",))), 0, 0)


def test_a_corpus_without_documents_is_refused() -> None:
    with pytest.raises(DataError, match="the corpus has no document"):
        PackedRows(ByteDocuments(Memory(())), 0, 4)


def test_a_piece_whose_targets_do_not_match_is_refused() -> None:
    with pytest.raises(DataError, match=r"document 3 has tokens of shape \(2,\) and targets of shape \(3,\)"):
        Piece(3, np.zeros(2, dtype=np.int64), np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("seq_length", [1, 3, 8, 50])
def test_rows_of_very_long_documents_are_the_same_and_read_in_parts(
    seq_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Memory((b"abcdefghijk", b"", b"l", b"mnopq"))

    def texts() -> list[tuple[list[int], list[int]]]:
        rows = PackedRows(ByteDocuments(corpus), seed=2, seq_length=seq_length)
        pieces = [piece for number in range(2 * rows.rows_per_pass) for piece in rows.sample(number)]
        return [(piece.tokens_T.tolist(), piece.targets_T.tolist()) for piece in pieces]

    whole = texts()
    monkeypatch.setattr("hetero_megatron.data.piece.WHOLE", 0)
    monkeypatch.setattr(Memory, "read", None)
    assert texts() == whole


def test_only_the_row_of_a_very_long_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(range(256)) * 4096)
    documents = ByteDocuments(Files.folder(tmp_path))
    rows = PackedRows(documents, seed=0, seq_length=16)
    assert rows.row(10)[0].tokens_T.tolist() == list(range(160, 176))
    assert rows.row(10)[0].targets_T.tolist() == list(range(161, 177))
    assert documents.part(0, 2**20 - 1, 2**20 + 1).tolist() == [255, 256]
    assert documents.part(0, 2**20, 2**20 + 1).tolist() == [256]
    (tmp_path / "long").write_bytes(bytes(range(256)) * 4095)
    with pytest.raises(DataError, match=r"has 1048320 bytes, but had 1048576 when the corpus was opened"):
        rows.row(10)
