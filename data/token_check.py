"""Token ids against the model's vocabulary: refused by number, before an embedding is asked for them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.documents import Documents, PartlyRead, Stream
from hetero_megatron.errors import DataError


def refuse_foreign(ids: NDArray[np.int64], vocab_size: int, told: str) -> None:
    """Refuse ids that a vocabulary of this size does not have; `told` names their document.

    Raises:
        DataError: naming the id, the document and the vocabulary.
    """
    if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        wrong = int(ids[np.argmax((ids < 0) | (ids >= vocab_size))])
        raise DataError(
            f"token id {wrong} in {told} is outside the model's vocabulary: vocab_size is {vocab_size}, so ids are 0 to "
            f"{vocab_size - 1}; the data was made with another tokenizer, or model.vocab_size is too small"
        )


@dataclass(frozen=True, slots=True)
class CheckedDocuments:
    """Documents whose ids are checked whenever they are read."""

    inner: Documents
    vocab_size: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return self.inner.lengths

    def name(self, index: int) -> str:
        """The document's name in messages."""
        return self.inner.name(index)

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The document's token ids, all of them in the vocabulary.

        Raises:
            DataError: one is not.
        """
        return self._checked(index, self.inner.tokens(index))

    def part(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Token ids [start, stop) of the document, all of them in the vocabulary.

        Raises:
            DataError: one is not.
        """
        inner = self.inner
        if isinstance(inner, PartlyRead):
            return self._checked(index, inner.part(index, start, stop))
        return self._checked(index, inner.tokens(index)[start:stop])

    def _checked(self, index: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        refuse_foreign(ids, self.vocab_size, f"document {index} ({self.inner.name(index)})")
        return ids


@dataclass(frozen=True, slots=True)
class CheckedStream:
    """A stream whose ids are checked as they come."""

    inner: Stream
    vocab_size: int

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        """The documents of pass `epoch` from number `first` on, all ids in the vocabulary.

        Raises:
            DataError: one is not.
        """
        for number, ids in enumerate(self.inner.read(epoch, first), first):
            refuse_foreign(ids, self.vocab_size, f"document {number} of the stream")
            yield ids
