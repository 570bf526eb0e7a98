"""Several sources in turn, each with its share of every prefix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.data.blend import PERIOD, Blend, long_document_reports
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import Samples
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from tests.data.memory import MemoryDocuments, MemoryStream, spelled


def rows(count: int) -> PackedRows:
    return PackedRows(MemoryDocuments([8] * count), 0, 8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 10**9))
def test_every_prefix_follows_the_weights_within_one_sample(weights: list[int], far: int) -> None:
    blend = Blend([rows(5)] * len(weights), weights)
    assert sum(blend.shares) == blend.period <= sum(weights)
    count = 2 * blend.period
    sources = np.array([blend.locate(number)[0] for number in range(min(count, 500))])
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.outer(np.arange(1, len(sources) + 1), np.array(weights) / sum(weights))
    assert np.abs(counts - wanted).max() < 1
    source, turn = blend.locate(far)
    assert abs(turn - far * weights[source] / sum(weights)) < 1


def test_samples_of_a_source_come_in_its_own_order() -> None:
    blend = Blend([rows(5), rows(9)], [0.7, 0.3])
    assert blend.shares == (7, 3)
    places = [blend.locate(number) for number in range(40)]
    for source in (0, 1):
        turns = [turn for own, turn in places if own == source]
        assert turns == list(range(len(turns)))
    assert [blend.locate(number) for number in (39, 3, 20)] == [places[39], places[3], places[20]]
    for number, (source, turn) in enumerate(places):
        assert spelled(blend.sample(number)) == spelled(blend.sources[source].sample(turn))


def test_lengths_are_those_of_the_samples() -> None:
    sources: list[Samples] = [
        DocumentSamples(MemoryDocuments([5, 9, 2]), 0, 8),
        DocumentSamples(MemoryDocuments([3, 8, 8, 1, 4]), 1, 8),
    ]
    blend = Blend(sources, [2, 1])
    lengths = blend.lengths(7, 50).tolist()
    assert lengths == [sum(map(len, blend.sample(number))) for number in range(7, 57)]
    assert blend.lengths(3, 0).tolist() == []
    assert blend.per_pass == blend.count_pass() == 4 + 5


def test_weights_are_shares_of_tokens_not_of_documents() -> None:
    short, long = MemoryDocuments([10] * 50), MemoryDocuments([40] * 50)
    blend = Blend([DocumentSamples(short, 0, 64), DocumentSamples(long, 0, 64)], [0.5, 0.5])
    assert blend.shares == (4, 1)
    found = blend.lengths(0, 1000)
    assert found[found == 10].sum() == found[found == 40].sum()


def test_weights_that_no_short_period_can_say_are_rounded() -> None:
    blend = Blend([rows(5)] * 3, [2**0.5, 1.0, 0.001])
    assert blend.period == PERIOD
    assert np.allclose(
        np.array(blend.shares) / PERIOD, np.array([2**0.5, 1, 0.001]) / (2**0.5 + 1.001), atol=1e-4
    )


def test_streams_can_be_mixed_and_do_not_know_their_pass() -> None:
    sources = [StreamSamples(MemoryStream([4] * 3), 0, 8), StreamSamples(MemoryStream([4] * 5), 0, 8)]
    blend = Blend(sources, [1, 1])
    assert blend.per_pass is None
    assert blend.count_pass() == 8
    assert blend.lengths(0, 20).tolist() == [4] * 20


def test_what_becomes_of_long_documents_is_told_for_each_source_that_has_some() -> None:
    long, short = (DocumentSamples(MemoryDocuments(sizes), 0, 8) for sizes in ([20, 3], [4, 4]))
    stream = StreamSamples(MemoryStream([40]), 0, 8)
    assert long_document_reports(Blend([short, long, stream, long], [1, 1, 1, 1])) == [
        long.report,
        long.report,
    ]
    assert long_document_reports(long) == [long.report]
    assert long_document_reports(rows(3)) == []


def test_one_source_is_itself() -> None:
    blend = Blend([rows(5)], [0.3])
    assert [blend.locate(number) for number in range(7)] == [(0, number) for number in range(7)]


def test_a_share_below_one_sample_of_a_period_is_refused() -> None:
    with pytest.raises(DataError, match="source 1 has 1e-07 of the samples, less than one of 65536"):
        Blend([rows(5), rows(5)], [1, 1e-7])


def test_a_weight_that_is_not_positive_is_refused() -> None:
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(DataError, match="source 1 has weight .*; weights are positive"):
            Blend([rows(5), rows(5)], [1, weight])


def test_as_many_weights_as_sources_are_needed() -> None:
    with pytest.raises(DataError, match="2 sources and 1 weights; each source has one weight"):
        Blend([rows(5), rows(5)], [1])


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(DataError, match="sample -1 does not exist"):
        Blend([rows(5)], [1]).sample(-1)
