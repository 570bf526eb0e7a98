"""Several sources as one, mixed by their weights so evenly that every stretch has each source's share (paper §8, data)."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.document_samples import DocumentSamples, LongDocumentReport
from hetero_megatron.data.piece import Piece
from hetero_megatron.data.samples import Samples
from hetero_megatron.errors import DataError

# The mixture repeats after at most this many samples; a share is a whole number of them.
PERIOD = 1 << 16
# How many samples of a source, or of a stream, tell its mean length.
MEASURED, STREAM_MEASURED = 1 << 20, 64


class Blend:
    """Samples of several sources in turn; `weights` are their shares of the tokens.

    The first k samples have k times its share of each source, within one sample, for every k. Sample k is found
    without looking at those before it: the mixture repeats, and inside a period it is a table. A source's own order
    and passes are kept; a pass of the blend is as many samples as one pass of every source has together.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        """Lengths are asked for to turn shares of tokens into shares of samples.

        Raises:
            DataError: no source, a weight that is not positive, or a share too small for the mixture.
        """
        if not sources or len(sources) != len(weights):
            raise DataError(f"{len(sources)} sources and {len(weights)} weights; each source has one weight")
        for number, weight in enumerate(weights):
            if not weight > 0:
                raise DataError(f"source {number} has weight {weight:g}; weights are positive")
        self.sources = tuple(sources)
        self.shares = _shares(_per_sample(sources, weights))
        self.period = sum(self.shares)
        self._choice = _mixture(self.shares)
        self._turn = np.zeros(self.period, dtype=np.int64)
        for number in range(len(sources)):
            own = self._choice == number
            self._turn[own] = np.arange(own.sum())

    @property
    def per_pass(self) -> int | None:
        """Samples of one pass of every source, together; None where a source does not know."""
        found = [source.per_pass for source in self.sources]
        return None if None in found else sum(each or 0 for each in found)

    def count_pass(self) -> int:
        """`per_pass`; streams are gone through once to know it."""
        return sum(source.count_pass() for source in self.sources)

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of samples [first, first + count)."""
        chosen, turns = self._locate(np.arange(first, first + count))
        found = np.zeros(count, dtype=np.int64)
        for number, source in enumerate(self.sources):
            own = chosen == number
            if own.any():  # the samples of one source are consecutive ones
                found[own] = source.lengths(int(turns[own][0]), int(own.sum()))
        return found

    def sample(self, number: int) -> tuple[Piece, ...]:
        """The pieces of sample `number`.

        Raises:
            DataError: the number is negative, or a document cannot be read.
        """
        if number < 0:
            raise DataError(f"sample {number} does not exist; samples are counted from 0")
        source, turn = self.locate(number)
        return self.sources[source].sample(turn)

    def locate(self, number: int) -> tuple[int, int]:
        """Which source sample `number` comes from, and which of its samples it is."""
        chosen, turns = self._locate(np.array([number]))
        return int(chosen[0]), int(turns[0])

    def _locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rounds, places = np.divmod(numbers, self.period)
        chosen = self._choice[places]
        return chosen, rounds * np.array(self.shares)[chosen] + self._turn[places]


def long_document_reports(samples: Samples) -> list[LongDocumentReport]:
    """What becomes of documents beyond seq_length, for each source where there are any and it is known."""
    sources = samples.sources if isinstance(samples, Blend) else (samples,)
    reports = [source.report for source in sources if isinstance(source, DocumentSamples)]
    return [report for report in reports if report.long_documents]


def _per_sample(sources: Sequence[Samples], weights: Sequence[float]) -> list[float]:
    """Shares of samples that make these shares of tokens."""
    means = []
    for source in sources:
        known = source.per_pass
        count = STREAM_MEASURED if known is None else min(known, MEASURED)
        means.append(max(1.0, float(source.lengths(0, count).mean())))
    if len(set(means)) == 1:
        return list(weights)
    return [weight / mean for weight, mean in zip(weights, means, strict=True)]


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of each period a source has: exactly by its weight where a short period can say it."""
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) / total for weight in weights]
    # 0.7 and 0.3 are meant, not what is nearest to them in binary.
    for shares in (exact, [share.limit_denominator(1000) for share in exact]):
        period = lcm(*(share.denominator for share in shares))
        close = all(abs(a - b) < 1e-12 for a, b in zip(shares, exact, strict=True))
        if close and sum(shares) == 1 and period <= PERIOD:
            return tuple(int(share * period) for share in shares)
    for number, share in enumerate(exact):
        if share * PERIOD < 1:
            raise DataError(
                f"source {number} has {float(share):.2g} of the samples, less than one of {PERIOD}; raise its weight "
                "or leave it out"
            )
    whole = [int(share * PERIOD) for share in exact]
    rest = sorted(range(len(exact)), key=lambda each: (whole[each] - exact[each] * PERIOD, each))
    for each in rest[: PERIOD - sum(whole)]:
        whole[each] += 1
    return tuple(whole)


def _mixture(shares: Sequence[int]) -> NDArray[np.int64]:
    """Which source each place of a period takes, every prefix within one sample of the shares.

    The rule of R. Tijdeman, The chairman assignment problem (1980): of the sources that are far enough behind,
    the one that would be too far behind first.
    """
    if len(shares) == 1:
        return np.zeros(shares[0], dtype=np.int64)
    period, scale = sum(shares), 2 * len(shares) - 2
    behind = [0] * len(shares)  # in units of 1 / period
    chosen = np.zeros(period, dtype=np.int64)
    for place in range(period):
        best, soonest = -1, 0.0
        for number, share in enumerate(shares):
            behind[number] += share
            if scale * behind[number] >= period:
                left = ((scale - 1) * period - scale * behind[number]) / share
                if best < 0 or left < soonest:
                    best, soonest = number, left
        assert best >= 0, "some source is always behind"
        behind[best] -= period
        chosen[place] = best
    return chosen
