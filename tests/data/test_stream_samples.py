"""Samples of a stream: shuffled in blocks, resumed at the block (cases O-51, O-53)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hetero_megatron.data.document_samples import LongDocuments
from hetero_megatron.data.lanes import Lane, flop_cost
from hetero_megatron.data.loader import Loader
from hetero_megatron.data.packing import DocumentPacking
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE
from tests.data.memory import MemoryStream, number_of, spelled


def order(samples: StreamSamples, first: int, last: int) -> list[int]:
    return [number_of(samples.sample(number)) for number in range(first, last)]


def test_blocks_of_a_pass_are_shuffled_each_and_the_last_one_is_partial() -> None:
    found = order(StreamSamples(MemoryStream([4] * 10), 3, 8, shuffle_buffer=4), 0, 30)
    for epoch in range(3):
        own = found[10 * epoch : 10 * epoch + 10]
        assert [sorted(own[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len({tuple(found[at : at + 10]) for at in (0, 10, 20)}) == 3
    assert found != order(StreamSamples(MemoryStream([4] * 10), 4, 8, shuffle_buffer=4), 0, 30)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.integers(1, 23),
    shuffle_buffer=st.integers(1, 9),
    stop=st.integers(0, 60),
    seed=st.integers(0, 9),
)
def test_a_resumed_stream_yields_what_the_uninterrupted_one_does(
    documents: int, shuffle_buffer: int, stop: int, seed: int
) -> None:
    def samples() -> StreamSamples:
        return StreamSamples(MemoryStream([3] * documents), seed, 8, shuffle_buffer=shuffle_buffer)

    whole = order(samples(), 0, 70)
    assert order(samples(), stop, 70) == whole[stop:]
    for epoch in range(70 // documents):
        assert sorted(whole[documents * epoch :][:documents]) == list(range(documents))
    assert samples().count_pass() == documents


def test_a_resumption_skips_to_its_block_and_reading_on_opens_nothing_again() -> None:
    stream = MemoryStream([4] * 100)
    samples = StreamSamples(stream, 0, 8, shuffle_buffer=10)
    samples.lengths(57, 20)
    order(samples, 57, 77)
    assert stream.opened == [(0, 50)]


def test_a_stream_is_read_once_however_many_blocks_a_step_spans() -> None:
    stream = MemoryStream([4] * 100)
    samples = StreamSamples(stream, 0, 8, shuffle_buffer=2)
    for first in (0, 20, 40):
        samples.lengths(first, 32)
        order(samples, first, first + 20)
    assert stream.opened == [(0, 0)]


@pytest.mark.parametrize(
    ("policy", "length", "pieces"), [("split", 19, [8, 8, 3]), ("truncate", 8, [8]), ("drop", 0, [])]
)
def test_a_long_document_of_a_stream_is_one_sample(
    policy: LongDocuments, length: int, pieces: list[int]
) -> None:
    samples = StreamSamples(MemoryStream([19]), 0, 8, policy)
    assert samples.lengths(0, 2).tolist() == [length, length]
    found = samples.sample(1)
    assert list(map(len, found)) == pieces
    assert [token for piece in spelled(found) for token in piece] == list(range(length))
    if pieces:
        assert found[-1].targets_T[-1] == IGNORE


class LineStream:
    """A stream that reads its file as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        with self.path.open() as file:
            for number, line in enumerate(file):
                if number >= first:
                    yield np.full(4, int(line))


def test_a_stream_that_was_read_before_the_workers_were_forked_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("".join(f"{number}\n" for number in range(20000)))
    samples = StreamSamples(LineStream(tmp_path / "numbers"), 0, 8, shuffle_buffer=4)
    samples.lengths(0, 8)
    lanes = [Lane(1, 400)]
    packing = DocumentPacking(samples, 8, lanes, flop_cost(1.0, 0.0, lanes))
    with Loader(Steps(samples, 50, 8, "documents"), packing, 0, workers=2) as loader:
        found = [loader.next() for _ in range(60)]
    numbers = [
        token for step in found if step for batch in step.batches for token in batch.tokens_T[::4].tolist()
    ]
    assert sorted(numbers) == list(range(6000))


def test_an_empty_stream_is_refused() -> None:
    for ask in (lambda samples: samples.sample(0), lambda samples: samples.count_pass()):
        with pytest.raises(DataError, match="the stream has no document"):
            ask(StreamSamples(MemoryStream([]), 0, 8))


def test_a_stream_that_gets_shorter_is_refused() -> None:
    stream = MemoryStream([3] * 6)
    samples = StreamSamples(stream, 0, 8, shuffle_buffer=4)
    order(samples, 0, 6)
    stream.sizes = [3] * 5
    with pytest.raises(DataError, match="ended after 5 documents in pass 1, and had 6 before"):
        order(samples, 6, 12)


def test_sizes_that_are_not_positive_are_refused() -> None:
    with pytest.raises(DataError, match="seq_length 8 and shuffle_buffer 0 must be positive"):
        StreamSamples(MemoryStream([3]), 0, 8, shuffle_buffer=0)


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(DataError, match="sample -1 does not exist"):
        StreamSamples(MemoryStream([3]), 0, 8).sample(-1)
