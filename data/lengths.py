"""How long documents are: percentiles, and what share of documents and tokens lies in which interval (paper §8)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Upper ends of the intervals, in tokens; the last one is open.
BORDERS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


INTERVALS = (
    f"up to {_short(BORDERS[0])}",
    *(f"{_short(low)} to {_short(high)}" for low, high in pairwise(BORDERS)),
    f"over {_short(BORDERS[-1])}",
)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Of a set of documents: how many, how long, and documents and tokens in each of INTERVALS."""

    documents: int
    tokens: int
    p50: int
    p90: int
    p99: int
    longest: int
    documents_by_interval: tuple[int, ...]
    tokens_by_interval: tuple[int, ...]

    @staticmethod
    def of(lengths: NDArray[np.int64]) -> "LengthStatistics":
        """The statistics of documents of these lengths, at least one; a percentile is the length of some document."""
        p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").astype(np.int64).tolist()
        places = np.searchsorted(BORDERS, lengths, side="left")
        documents = np.bincount(places, minlength=len(INTERVALS))
        # Sums of whole numbers: floating-point weights would lose tokens above 2 to the 53rd.
        tokens = [int(lengths[places == place].sum()) for place in range(len(INTERVALS))]
        return LengthStatistics(
            len(lengths),
            int(lengths.sum()),
            p50,
            p90,
            p99,
            int(lengths.max()),
            tuple(documents.tolist()),
            tuple(tokens),
        )
