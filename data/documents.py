"""What every corpus looks like once its text is tokens: numbered documents whose lengths are known (paper §8, data)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Documents(Protocol):
    """Tokenized documents with random access; the end token is part of a document and counted in its length."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, all 1 or more, known without reading any."""
        ...

    def name(self, index: int) -> str:
        """The document's name in messages: its file, or its file and line."""
        ...

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The document's token ids.

        Raises:
            DataError: it cannot be read, or is no longer what it was when the corpus was opened.
        """
        ...


@runtime_checkable
class PartlyRead(Protocol):
    """Documents of which a part can be read without the rest; a row of a very long document is a small part of it."""

    def part(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Token ids [start, stop) of the document.

        Raises:
            DataError: as for `tokens`.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """Tokenized documents that can only be read one after another, such as a dataset streamed from the hub."""

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        """An iterator over the documents of pass `epoch` from number `first` on, each its token ids.

        The pass always has the same documents in the same order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """Documents or a stream of them, and their share of the tokens relative to the other sources of a run."""

    documents: Documents | Stream
    weight: float = 1.0
