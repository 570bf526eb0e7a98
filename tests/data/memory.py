"""Documents and streams in memory whose tokens say where they come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.piece import Piece


def document(number: int, length: int) -> NDArray[np.int64]:
    """Token j of document i is 1000 i + j."""
    return np.arange(length, dtype=np.int64) + 1000 * number


@dataclass
class MemoryDocuments:
    """Documents of these lengths that note which were read."""

    sizes: Sequence[int]
    reads: list[int] = field(default_factory=list)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array(self.sizes, dtype=np.int64)

    def name(self, index: int) -> str:
        return f"document {index}"

    def tokens(self, index: int) -> NDArray[np.int64]:
        self.reads.append(index)
        return document(index, self.sizes[index])


@dataclass
class MemoryStream:
    """A stream of documents of these lengths that notes where it was opened."""

    sizes: Sequence[int]
    opened: list[tuple[int, int]] = field(default_factory=list)

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        self.opened.append((epoch, first))
        return (document(number, self.sizes[number]) for number in range(first, len(self.sizes)))


def spelled(pieces: Sequence[Piece]) -> list[list[int]]:
    """Token ids of each piece."""
    return [piece.tokens_T.tolist() for piece in pieces]


def number_of(pieces: Sequence[Piece]) -> int:
    """The document that the first piece comes from."""
    return int(pieces[0].tokens_T[0]) // 1000
