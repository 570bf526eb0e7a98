"""Packing: segments, positions, padding (case O-39: no loss over the border between documents)."""

import pytest

from hetero_megatron.data.batch import pack, piece_of
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE

DOCUMENTS = ([5, 6, 2], [7, 2], [8, 9, 10, 2])


def valid_targets(targets: list[int]) -> list[int]:
    return [index for index, target in enumerate(targets) if target != IGNORE]


def test_documents_packed_into_ten_with_one_pad() -> None:
    batch = pack(map(piece_of, DOCUMENTS), multiple=10)
    assert batch.tokens_T.tolist() == [5, 6, 2, 7, 2, 8, 9, 10, 2, 0]
    assert batch.segments.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert batch.segments.cu_seqlens == (0, 3, 5, 9, 10)
    assert valid_targets(batch.targets_T.tolist()) == [0, 1, 3, 5, 6, 7]
    assert batch.valid_tokens == 6


def test_without_padding_there_is_no_extra_segment() -> None:
    batch = pack(map(piece_of, DOCUMENTS))
    assert batch.segments.cu_seqlens == (0, 3, 5, 9)
    assert batch.segments.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.targets_T.tolist() == [6, 2, IGNORE, 2, IGNORE, 9, 10, 2, IGNORE]


def test_the_same_documents_unpacked_have_the_same_targets_and_divisor() -> None:
    packed = pack(map(piece_of, DOCUMENTS), multiple=10)
    alone = [pack([piece_of(document)]) for document in DOCUMENTS]
    assert sum(batch.valid_tokens for batch in alone) == packed.valid_tokens
    assert [t for batch in alone for t in batch.targets_T.tolist()] == packed.targets_T.tolist()[:9]


def test_empty_documents_leave_no_segment() -> None:
    batch = pack([piece_of([]), piece_of([5, 6, 2]), piece_of([]), piece_of([7, 2])], multiple=5)
    assert batch.segments.cu_seqlens == (0, 3, 5)


def test_a_lone_end_token_counts_nothing() -> None:
    assert pack([piece_of([256])]).valid_tokens == 0


def test_a_micro_batch_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="a micro-batch without a token cannot be packed"):
        pack([piece_of([])])


def test_padding_to_a_multiple_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be padded to a multiple of 0"):
        pack([piece_of([1])], multiple=0)
