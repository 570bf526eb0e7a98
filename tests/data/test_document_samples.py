"""Documents as samples, and what happens to long ones (case O-42)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hetero_megatron.data.batch import pack
from hetero_megatron.data.document_samples import DocumentSamples, LongDocuments
from hetero_megatron.data.order import epoch_order
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE
from tests.data.memory import MemoryDocuments, document, spelled

LONG = (37, 16, 17, 3)


@pytest.mark.parametrize(
    ("policy", "pieces", "kept", "lost"),
    [
        ("split", {0: [16, 16, 5], 1: [16], 2: [16, 1], 3: [3]}, 73, 0),
        ("truncate", {0: [16], 1: [16], 2: [16], 3: [3]}, 51, 22),
        ("drop", {1: [16], 3: [3]}, 19, 54),
    ],
)
def test_documents_longer_than_the_context_are_split_truncated_or_dropped(
    policy: LongDocuments, pieces: dict[int, list[int]], kept: int, lost: int
) -> None:
    samples = DocumentSamples(MemoryDocuments(LONG), 5, 16, policy)
    wanted = [(number, size) for number in epoch_order(4, 5, 0).tolist() for size in pieces.get(number, [])]
    found = [samples.sample(number) for number in range(samples.per_pass)]
    assert [(piece.document, len(piece)) for (piece,) in found] == wanted
    assert samples.lengths(0, samples.per_pass).tolist() == [size for _, size in wanted]
    report = samples.report
    assert (report.kept_tokens, report.lost_tokens, report.samples) == (kept, lost, len(wanted))
    assert (report.documents, report.long_documents) == (4, 2)
    assert str(report) == (
        f"long_documents: {policy}: 2 of 4 documents have more than 16 tokens; {len(wanted)} samples, "
        f"{kept} tokens kept, {lost} lost"
    )


def test_split_pieces_are_consecutive_and_targets_go_on_into_the_next() -> None:
    samples = DocumentSamples(MemoryDocuments((37,)), 0, 16)
    pieces = [samples.sample(number)[0] for number in range(3)]
    assert np.concatenate([piece.tokens_T for piece in pieces]).tolist() == document(0, 37).tolist()
    targets = np.concatenate([piece.targets_T for piece in pieces]).tolist()
    assert targets == [*document(0, 37)[1:].tolist(), IGNORE]


def test_a_truncated_document_ends_where_it_is_cut() -> None:
    (piece,) = DocumentSamples(MemoryDocuments((37,)), 0, 16, "truncate").sample(0)
    assert piece.targets_T.tolist() == [*range(1, 16), IGNORE]


def test_a_piece_of_one_token_has_no_target() -> None:
    samples = DocumentSamples(MemoryDocuments((17,)), 0, 16)
    batch = pack(samples.sample(1))
    assert batch.tokens_T.tolist() == [16]
    assert batch.valid_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    seq_length=st.integers(1, 12),
    policy=st.sampled_from(["split", "truncate"]),
    first=st.integers(0, 60),
    count=st.integers(0, 60),
)
def test_lengths_are_those_of_the_samples_over_any_number_of_passes(
    sizes: list[int], seq_length: int, policy: LongDocuments, first: int, count: int
) -> None:
    documents = MemoryDocuments(sizes)
    samples = DocumentSamples(documents, 3, seq_length, policy)
    lengths = samples.lengths(first, count).tolist()
    assert documents.reads == []
    assert lengths == [len(samples.sample(number)[0]) for number in range(first, first + count)]


def test_passes_have_the_same_samples_in_another_order() -> None:
    samples = DocumentSamples(MemoryDocuments([5, 9, 2, 7, 30]), 0, 8)
    assert samples.count_pass() == samples.per_pass == 1 + 2 + 1 + 1 + 4
    passes = [
        [tuple(spelled(samples.sample(number))[0]) for number in range(9 * epoch, 9 * epoch + 9)]
        for epoch in range(3)
    ]
    assert len({tuple(each) for each in passes}) == 3
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])


def test_a_sample_reads_only_its_document() -> None:
    documents = MemoryDocuments([5] * 20)
    samples = DocumentSamples(documents, 0, 8)
    samples.sample(13)
    assert documents.reads == [int(epoch_order(20, 0, 0)[13])]


def test_a_document_that_changed_its_length_is_refused_by_name() -> None:
    documents = MemoryDocuments([5, 6])
    samples = DocumentSamples(documents, 0, 8)
    documents.sizes = [4, 4]
    with pytest.raises(
        DataError, match=r"document \d \(document \d\) has 4 tokens, and had \d when the corpus"
    ):
        samples.sample(0)


def test_dropping_every_document_is_refused() -> None:
    with pytest.raises(
        DataError, match="long_documents: drop leaves no document: all 2 have more than 16 tokens"
    ):
        DocumentSamples(MemoryDocuments((17, 40)), 0, 16, "drop")


def test_a_corpus_without_documents_has_no_sample() -> None:
    with pytest.raises(DataError, match="the corpus has no document, so there is no sample"):
        DocumentSamples(MemoryDocuments(()), 0, 16)


def test_samples_without_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="seq_length is 0; a sample holds 1 token or more"):
        DocumentSamples(MemoryDocuments((3,)), 0, 0)


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(DataError, match="sample -1 does not exist"):
        DocumentSamples(MemoryDocuments((3,)), 0, 4).sample(-1)


class PartlyReadDocuments(MemoryDocuments):
    """Documents that are never read whole."""

    def tokens(self, index: int) -> NDArray[np.int64]:
        raise AssertionError(f"document {index} was read whole")

    def part(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        return document(index, self.sizes[index])[start:stop]


@pytest.mark.parametrize("policy", ["split", "truncate"])
def test_pieces_of_very_long_documents_are_the_same_and_read_alone(
    policy: LongDocuments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(documents: MemoryDocuments) -> list[tuple[list[int], list[int]]]:
        samples = DocumentSamples(documents, 2, 16, policy)
        pieces = [samples.sample(number)[0] for number in range(samples.per_pass)]
        return [(piece.tokens_T.tolist(), piece.targets_T.tolist()) for piece in pieces]

    whole = texts(MemoryDocuments(LONG))
    monkeypatch.setattr("hetero_megatron.data.piece.WHOLE", 0)
    assert texts(PartlyReadDocuments(LONG)) == whole
