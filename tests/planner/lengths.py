"""Document lengths as published quantiles of English Wikipedia in tokens give them."""

import numpy as np
from numpy.typing import NDArray

# Share of documents, tokens.
QUANTILES = (
    (0.0, 8),
    (0.05, 67),
    (0.10, 87),
    (0.25, 146),
    (0.50, 347),
    (0.75, 862),
    (0.90, 2112),
    (0.95, 3720),
    (0.97, 5390),
    (0.99, 10919),
    (0.999, 37353),
    (0.9999, 101537),
    (1.0, 1823777),
)


def wikipedia_like(count: int = 20_000) -> NDArray[np.int64]:
    """`count` lengths, evenly spaced in probability between the quantiles."""
    shares = (np.arange(count) + 0.5) / count
    known, tokens = zip(*QUANTILES, strict=True)
    found: NDArray[np.int64] = np.exp(np.interp(shares, known, np.log(tokens))).astype(np.int64)
    return found
