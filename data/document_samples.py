"""Documents as samples: each comes whole, or in pieces by the policy for long ones (paper §8, packing).

Shape legend: `T` tokens of a piece.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.documents import Documents
from hetero_megatron.data.order import epoch_order
from hetero_megatron.data.piece import Piece, RecentDocuments
from hetero_megatron.errors import DataError

LongDocuments = Literal["split", "truncate", "drop"]


@dataclass(frozen=True, slots=True)
class LongDocumentReport:
    """What a policy for documents longer than the context does to one pass."""

    policy: LongDocuments
    seq_length: int
    documents: int
    long_documents: int
    samples: int
    kept_tokens: int
    lost_tokens: int

    def __str__(self) -> str:
        """Such as `long_documents: split: 2 of 4 documents have more than 16 tokens; 7 samples, 73 tokens ...`."""
        return (
            f"long_documents: {self.policy}: {self.long_documents} of {self.documents} documents have more than "
            f"{self.seq_length} tokens; {self.samples} samples, {self.kept_tokens} tokens kept, "
            f"{self.lost_tokens} lost"
        )


class DocumentSamples:
    """Every document of a pass in shuffled order; long ones as consecutive pieces, cut short, or left out.

    Under `split` a piece's last target is the first token of the next piece, as at the border of a row. Under
    `truncate` the document ends where it is cut, and its last token has no target.
    """

    def __init__(
        self, documents: Documents, seed: int, seq_length: int, long_documents: LongDocuments = "split"
    ) -> None:
        """Look at the documents' lengths, read none.

        Raises:
            DataError: no document, or none that the policy keeps; seq_length is not positive.
        """
        if seq_length < 1:
            raise DataError(f"seq_length is {seq_length}; a sample holds 1 token or more")
        self.seed, self.seq_length, self.long_documents = seed, seq_length, long_documents
        self._lengths = documents.lengths
        if not len(self._lengths):
            raise DataError("the corpus has no document, so there is no sample")
        self._pieces = _pieces(self._lengths, seq_length, long_documents)
        self.report = self._reported()
        if not self.report.samples:
            raise DataError(
                f"long_documents: drop leaves no document: all {len(self._lengths)} have more than "
                f"{seq_length} tokens; split or truncate them, or raise seq_length"
            )
        self._recent = RecentDocuments(documents)
        self._pass: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def per_pass(self) -> int:
        """Samples in one pass."""
        return self.report.samples

    def count_pass(self) -> int:
        """Samples in one pass."""
        return self.per_pass

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of samples [first, first + count)."""
        found: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        while count > 0:
            epoch, place = divmod(first, self.per_pass)
            take = min(count, self.per_pass - place)
            documents, pieces = self._locate(epoch, np.arange(place, place + take))
            found.append(np.minimum(self._lengths[documents] - pieces * self.seq_length, self.seq_length))
            first, count = first + take, count - take
        return np.concatenate(found)

    def sample(self, number: int) -> tuple[Piece, ...]:
        """The one piece of sample `number`.

        Raises:
            DataError: the number is negative, or the document cannot be read.
        """
        if number < 0:
            raise DataError(f"sample {number} does not exist; samples are counted from 0")
        epoch, place = divmod(number, self.per_pass)
        documents, pieces = self._locate(epoch, np.array([place]))
        document, start = int(documents[0]), int(pieces[0]) * self.seq_length
        end = int(self._lengths[document])
        if self.long_documents == "truncate":
            end = min(end, self.seq_length)
        return (self._recent.piece(document, start, min(start + self.seq_length, end), end),)

    def _locate(self, epoch: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The documents at these places of a pass, and which of their pieces stand there."""
        if self._pass is None or self._pass[0] != epoch:
            order = epoch_order(len(self._lengths), self.seed, epoch)
            self._pass = (epoch, order, np.cumsum(self._pieces[order]))
        _, order, ends = self._pass
        turns = np.searchsorted(ends, places, side="right")
        documents = order[turns]
        return documents, places - (ends[turns] - self._pieces[documents])

    def _reported(self) -> LongDocumentReport:
        long = self._lengths > self.seq_length
        total = int(self._lengths.sum())
        lost = {
            "split": 0,
            "truncate": int((self._lengths[long] - self.seq_length).sum()),
            "drop": int(self._lengths[long].sum()),
        }[self.long_documents]
        samples = int(self._pieces.sum())
        sizes = (len(self._lengths), int(long.sum()), samples)
        return LongDocumentReport(self.long_documents, self.seq_length, *sizes, total - lost, lost)


def _pieces(lengths: NDArray[np.int64], seq_length: int, policy: LongDocuments) -> NDArray[np.int64]:
    """How many samples each document becomes."""
    if policy == "split":
        return -(-lengths // seq_length)
    if policy == "truncate":
        return np.ones_like(lengths)
    return (lengths <= seq_length).astype(np.int64)
