"""Statistics of document lengths."""

import numpy as np

from hetero_megatron.data.lengths import INTERVALS, LengthStatistics


def test_borders_belong_to_the_lower_interval() -> None:
    lengths = np.array([1, 512, 513, 1024, 1025, 2048, 4096, 8192, 16384, 32768, 32769, 100000])
    found = LengthStatistics.of(lengths)
    assert INTERVALS[0] == "up to 512"
    assert INTERVALS[1] == "512 to 1K"
    assert INTERVALS[-1] == "over 32K"
    assert found.documents_by_interval == (2, 2, 2, 1, 1, 1, 1, 2)
    assert found.tokens_by_interval == (513, 1537, 3073, 4096, 8192, 16384, 32768, 132769)
    assert (found.documents, found.tokens, found.longest) == (12, int(lengths.sum()), 100000)


def test_percentiles_are_lengths_of_documents() -> None:
    found = LengthStatistics.of(np.arange(1, 1001))
    assert (found.p50, found.p90, found.p99) == (500, 900, 990)
    one = LengthStatistics.of(np.array([7]))
    assert (one.p50, one.p90, one.p99, one.longest) == (7, 7, 7, 7)
