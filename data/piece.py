"""What packing puts together: runs of tokens of one document, each with its targets (paper §8, packing).

Shape legend: `T` tokens of a piece.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.documents import Documents, PartlyRead
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE

# How many documents are kept in memory, and of how many tokens one may be to be read whole.
KEPT_DOCUMENTS, WHOLE = 64, 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of tokens of one document inside one row: attention and positions start anew with each piece."""

    document: int
    tokens_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.tokens_T.shape != self.targets_T.shape or self.tokens_T.ndim != 1:
            raise DataError(
                f"a piece of document {self.document} has tokens of shape {self.tokens_T.shape} and targets "
                f"of shape {self.targets_T.shape}; both must be one row of equal length"
            )

    def __len__(self) -> int:
        """Tokens in this piece."""
        return len(self.tokens_T)


def piece_of(document: Sequence[int] | NDArray[np.int64], number: int = 0) -> Piece:
    """A whole document as one piece: each token's target is the next one, the last has none."""
    tokens_T = np.asarray(document, dtype=np.int64)
    return cut(tokens_T, 0, len(tokens_T), number)


def cut(tokens_T: NDArray[np.int64], start: int, stop: int, number: int) -> Piece:
    """Tokens [start, stop) of document `number`; the target of the last one is the token behind it, if there is one."""
    targets_T = np.full(stop - start, IGNORE, dtype=np.int64)
    following = tokens_T[start + 1 : stop + 1]
    targets_T[: len(following)] = following
    return Piece(number, tokens_T[start:stop], targets_T)


class RecentDocuments:
    """Cuts pieces out of documents: of very long ones it reads only the piece, of others it keeps the latest whole."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self._lengths = documents.lengths
        self._kept: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def piece(self, number: int, start: int, stop: int, end: int | None = None) -> Piece:
        """Tokens [start, stop) of document `number`, which ends at `end`, or where it really does.

        Raises:
            DataError: it cannot be read, or has another length than was said.
        """
        length = int(self._lengths[number])
        end = length if end is None else end
        if length > WHOLE and isinstance(self.documents, PartlyRead):
            tokens_T = self.documents.part(number, start, min(stop + 1, end))
            return cut(tokens_T, 0, stop - start, number)
        return cut(self._tokens(number)[:end], start, stop, number)

    def _tokens(self, number: int) -> NDArray[np.int64]:
        if number not in self._kept:
            tokens_T = self.documents.tokens(number)
            if len(tokens_T) != self._lengths[number]:
                raise DataError(
                    f"document {number} ({self.documents.name(number)}) has {len(tokens_T)} tokens, and had "
                    f"{self._lengths[number]} when the corpus was opened; a corpus must not change during a run"
                )
            self._kept[number] = tokens_T
            while len(self._kept) > KEPT_DOCUMENTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]
