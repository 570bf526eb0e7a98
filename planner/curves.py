"""Seconds of an operator as a function of document lengths: fitted inside what was measured (paper A.1).

A micro-batch of documents with lengths l has `tokens` = sum of l and `pairs` = sum of l * l; causal attention looks at
half the pairs. Matrix products are linear in tokens, attention is linear in pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Point:
    """One measured time: a micro-batch of `tokens` tokens in documents of `seq_length`."""

    tokens: int
    seq_length: int
    seconds: float

    @property
    def pairs(self) -> int:
        """Sum of squared document lengths; the last document may be shorter."""
        whole, rest = divmod(self.tokens, self.seq_length)
        return whole * self.seq_length**2 + rest**2


@dataclass(frozen=True, slots=True)
class Curve:
    """constant + per_token * tokens + per_pair * pairs, in seconds.

    Attributes:
        knots: what was measured, per document length: (tokens, seconds), ascending; between two of them, documents of
            just this length take what lies on the line between.
        tokens, lengths: the measured ranges, None where nothing was measured.
    """

    constant: float
    per_token: float
    per_pair: float
    knots: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    tokens: tuple[int, int] | None = None
    lengths: tuple[int, int] | None = None

    def seconds(self, tokens: float, pairs: float) -> float:
        """Time of a micro-batch; 0 tokens take nothing."""
        if tokens <= 0:
            return 0.0
        known = self.knots.get(round(pairs / tokens)) if self.knots else None
        if known is not None and known[0][0] <= tokens <= known[-1][0]:
            return float(np.interp(tokens, [t for t, _ in known], [s for _, s in known]))
        return self.constant + self.per_token * tokens + self.per_pair * pairs

    def outside(self, tokens: float, length: float) -> str | None:
        """Why a time would be a guess: beyond what was measured; None inside, or where nothing was measured."""
        if self.tokens is not None and not self.tokens[0] <= tokens <= self.tokens[1]:
            return f"{tokens:.0f} tokens, measured {self.tokens[0]} to {self.tokens[1]}"
        if self.lengths is not None and not self.lengths[0] <= length <= self.lengths[1]:
            return f"documents of {length:.0f} tokens, measured {self.lengths[0]} to {self.lengths[1]}"
        return None

    def scaled(self, factor: float) -> "Curve":
        """The curve with every time multiplied."""
        knots = {length: tuple((t, factor * s) for t, s in own) for length, own in self.knots.items()}
        return Curve(
            factor * self.constant,
            factor * self.per_token,
            factor * self.per_pair,
            knots,
            self.tokens,
            self.lengths,
        )


def fit(points: Sequence[Point], prior: Curve) -> Curve:
    """Least squares of relative errors with coefficients of 0 or more.

    What the points do not tell apart keeps the proportions of `prior`: with one size measured, the prior is scaled;
    with one document length, tokens and pairs keep the prior's proportion.
    """
    seconds = np.array([max(point.seconds, 1e-12) for point in points])
    rows = np.array([[1.0, point.tokens, point.pairs] for point in points])
    shape = np.array([prior.constant, prior.per_token, prior.per_pair])
    varied = len({point.pairs / point.tokens for point in points}) > 1
    if len({point.tokens for point in points}) < 2 and not varied:
        basis = shape[:, None]
    elif varied:
        basis = np.eye(3)
    else:
        basis = np.array([[1.0, 0.0], [0.0, shape[1]], [0.0, shape[2]]])
    found = basis @ positive(rows @ basis / seconds[:, None])
    knots = _knots(points)
    tokens, lengths = [point.tokens for point in points], [point.seq_length for point in points]
    return Curve(
        float(found[0]),
        float(found[1]),
        float(found[2]),
        knots,
        (min(tokens), max(tokens)),
        (min(lengths), max(lengths)),
    )


def _knots(points: Sequence[Point]) -> dict[int, tuple[tuple[int, float], ...]]:
    """Medians per document length and size; a size that took longer than a larger one takes what the larger one took."""
    groups: dict[int, dict[int, list[float]]] = {}
    for point in points:
        groups.setdefault(point.seq_length, {}).setdefault(point.tokens, []).append(point.seconds)
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for length, sizes in groups.items():
        least, falling = float("inf"), []
        for tokens, own in sorted(sizes.items(), reverse=True):
            least = min(least, float(np.median(own)))
            falling.append((tokens, least))
        found[length] = tuple(reversed(falling))
    return found


def positive(rows: np.ndarray) -> np.ndarray:
    """x >= 0 that brings rows @ x nearest to 1: the best of all choices of coefficients that stay positive."""
    count = rows.shape[1]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, error = np.zeros(count), np.inf
    for mask in range(1, 2**count):
        chosen = [place for place in range(count) if mask >> place & 1]
        solved, *_ = np.linalg.lstsq(rows[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=None)
        if (solved < 0).any():
            continue
        missed = float(((rows[:, chosen] / scale[chosen] @ solved - 1) ** 2).sum())
        if missed < error - 1e-15:
            best, error = np.zeros(count), missed
            best[chosen] = solved / scale[chosen]
    return best
