"""Megatron's pair of files: exact bytes, and everything that can be wrong with one."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data.indexed import IndexedDocuments, IndexedWriter, id_dtype
from hetero_megatron.data.token_check import CheckedDocuments
from hetero_megatron.errors import DataError

DOCUMENTS = [[5, 6, 7, 2], [9, 2], [1, 1, 2, 3, 2]]


def write(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 100) -> Path:
    writer = IndexedWriter(prefix, vocab_size)
    for document in documents:
        writer.add(document)
    writer.finish()
    return prefix


def index_bytes(lengths: list[int], code: int, itemsize: int, borders: list[int] | None = None) -> bytes:
    """The .idx by Megatron's description, number by number."""
    borders = list(range(len(lengths) + 1)) if borders is None else borders
    starts = [sum(lengths[:n]) * itemsize for n in range(len(lengths))]
    parts = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, code, len(lengths), len(borders))]
    parts += [struct.pack("<i", length) for length in lengths]
    parts += [struct.pack("<q", number) for number in (*starts, *borders)]
    return b"".join(parts)


@pytest.mark.parametrize(("vocab_size", "code", "letter"), [(100, 8, "H"), (65499, 8, "H"), (65500, 4, "i")])
def test_the_files_have_the_bytes_that_megatron_writes(
    tmp_path: Path, vocab_size: int, code: int, letter: str
) -> None:
    write(tmp_path / "c", DOCUMENTS, vocab_size)
    ids = [number for document in DOCUMENTS for number in document]
    assert (tmp_path / "c.bin").read_bytes() == struct.pack(f"<{len(ids)}{letter}", *ids)
    assert (tmp_path / "c.idx").read_bytes() == index_bytes([4, 2, 5], code, struct.calcsize(letter))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_what_was_written_is_read_back(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "c", DOCUMENTS)
    documents = IndexedDocuments(f"{tmp_path / 'c'}{suffix}")
    assert documents.lengths.tolist() == [4, 2, 5]
    assert [documents.tokens(index).tolist() for index in range(3)] == DOCUMENTS
    assert documents.tokens(0).dtype == np.int64
    assert documents.name(1) == f"{tmp_path / 'c'}.bin document 1"
    assert documents.first_outside(10) is None
    assert [documents.first_outside(size) for size in (9, 8, 7)] == [1, 1, 0]


def test_a_part_is_read_without_the_rest_and_checked_alone(tmp_path: Path) -> None:
    documents = IndexedDocuments(write(tmp_path / "c", DOCUMENTS))
    assert documents.part(2, 1, 4).tolist() == [1, 2, 3]
    checked = CheckedDocuments(documents, 3)
    assert checked.part(2, 0, 3).tolist() == [1, 1, 2]
    with pytest.raises(DataError, match="3"):
        checked.part(2, 1, 4)


def test_sequences_of_one_document_are_read_as_one_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    """Megatron keeps sentences as sequences when it is asked to split them."""
    (tmp_path / "c.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    (tmp_path / "c.idx").write_bytes(index_bytes([1, 2, 0, 3], 4, 4, borders=[0, 2, 3, 4]))
    documents = IndexedDocuments(tmp_path / "c")
    assert documents.lengths.tolist() == [3, 3]
    assert [documents.tokens(index).tolist() for index in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_nothing_stands_at_the_prefix_before_the_end_and_after_giving_up(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1]])
    writer = IndexedWriter(tmp_path / "c", 100)
    writer.add([2, 3])
    assert IndexedDocuments(tmp_path / "c").tokens(0).tolist() == [1]
    writer.abandon()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_an_id_that_does_not_fit_the_type_is_refused(tmp_path: Path) -> None:
    assert id_dtype(100) == np.uint16
    writer = IndexedWriter(tmp_path / "c", 100)
    writer.add([65535])
    for wrong in (65536, -1):
        with pytest.raises(
            DataError, match=rf"document 1 has token id {wrong}, .* fit into uint16 \(0 to 65535\)"
        ):
            writer.add([3, wrong])


def test_a_document_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 0 has no token; leave it out"):
        IndexedWriter(tmp_path / "c", 100).add([])


def test_a_document_that_megatron_could_not_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a document of 2147483648 tokens is too long; at most 2147483647"):
        IndexedWriter(tmp_path / "c", 100).add_written(b"", np.array([2**31]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_half_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "c", DOCUMENTS)
    (tmp_path / f"c{suffix}").unlink()
    with pytest.raises(
        DataError, match=rf"c\{suffix} does not exist or is not a file; .* is a \.bin/\.idx pair"
    ):
        IndexedDocuments(tmp_path / "c")


def test_a_cut_bin_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    content = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(content[:-3])
    with pytest.raises(
        DataError, match=r"c\.bin has 19 bytes, but .*c\.idx describes 22 \(11 tokens of 2 bytes\)"
    ):
        IndexedDocuments(tmp_path / "c")


def test_a_bin_of_another_index_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    write(tmp_path / "d", [*DOCUMENTS, [1, 2]])
    (tmp_path / "d.bin").replace(tmp_path / "c.bin")
    with pytest.raises(DataError, match=r"c\.bin has 26 bytes, but .*c\.idx describes 22"):
        IndexedDocuments(tmp_path / "c")


def test_a_cut_index_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    path = tmp_path / "c.idx"
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(
        DataError, match=rf"has {len(content) - 8} bytes, but 3 sequences .* take {len(content)}"
    ):
        IndexedDocuments(tmp_path / "c")
    path.write_bytes(content[:20])
    with pytest.raises(DataError, match=r"c\.idx is cut off: it has 20 bytes, and its head alone 34"):
        IndexedDocuments(tmp_path / "c")


def test_a_foreign_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    (tmp_path / "c.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))
    with pytest.raises(DataError, match=r"c\.idx is no Megatron index: it does not start with MMIDIDX"):
        IndexedDocuments(tmp_path / "c")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (9, 2, r"has version 2 of the format; version 1 can be read"),
        (17, 6, r"says that ids are of type 6, which is no whole number; known types: 1 \(uint8\)"),
        (17, 99, r"ids are of type 99"),
        (34, 3, r"sequence 1 starts at byte 8 and has 2 tokens; .* it should start at byte 6"),
        (34 + 12 + 24 + 24, 2, r"the document borders do not lead from 0 to 3"),
        (34 + 12 + 24, 1, r"the document borders do not lead from 0 to 3"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, place: int, value: int, message: str) -> None:
    write(tmp_path / "c", DOCUMENTS)
    content = bytearray((tmp_path / "c.idx").read_bytes())
    content[place] = value
    (tmp_path / "c.idx").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedDocuments(tmp_path / "c")


def test_a_pair_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.bin").touch()
    (tmp_path / "c.idx").write_bytes(index_bytes([0], 4, 4))
    with pytest.raises(DataError, match=r"c\.idx has no document with a token"):
        IndexedDocuments(tmp_path / "c")


def test_a_bin_that_shrinks_while_it_is_open_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    documents = IndexedDocuments(tmp_path / "c")
    with (tmp_path / "c.bin").open("r+b") as file:
        file.truncate(4)
    with pytest.raises(
        DataError, match=r"has 4 bytes, but had 22 when it was opened; a corpus must not change"
    ):
        documents.tokens(2)
