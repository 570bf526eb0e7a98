"""What training counts: samples, numbered from 0 without end, in an order that no parallel strategy changes.

A sample is a row of seq_length tokens or a document; sample k is the same for every strategy, number of ranks,
number of workers and after every resumption. A step takes consecutive samples.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.piece import Piece


class Samples(Protocol):
    """Endless numbered samples; every `per_pass` of them are one pass over the corpus."""

    @property
    def per_pass(self) -> int | None:
        """Samples in one pass; None for a stream, which does not know before it has ended."""
        ...

    def count_pass(self) -> int:
        """`per_pass`; a stream is gone through once to know it."""
        ...

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of samples [first, first + count)."""
        ...

    def sample(self, number: int) -> tuple[Piece, ...]:
        """The pieces of sample `number`, each a segment of its own."""
        ...


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a run stands in its data: the iteration that comes next (from 0) and the first sample it takes.

    It says nothing of ranks or pipelines, so a run goes on from it under any strategy.
    """

    iteration: int = 0
    sample: int = 0
