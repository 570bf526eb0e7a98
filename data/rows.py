"""Packed rows: fixed-length pieces of the endless token stream of all documents (paper §8, packing).

Row r holds tokens [r*S, (r+1)*S) of the stream; sample k is a row, chosen by a shuffle of rows so that one
step does not see one long document only. Both follow from the corpus, the seed and S, and from nothing that a
parallel strategy says: two strategies, or a run and its resumption, train on the same samples.

Shape legend: `T` tokens of a piece, `S` tokens of a row.
"""

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.documents import Documents
from hetero_megatron.data.order import ROWS, epoch_order
from hetero_megatron.data.piece import Piece, RecentDocuments
from hetero_megatron.errors import DataError


class PackedRows:
    """Rows of `seq_length` tokens over documents; a row reads only the documents it touches.

    Each document ends with the end token. A target is the next token of the same document, also across a row
    border; a document's last token has no target.
    """

    def __init__(self, documents: Documents, seed: int, seq_length: int) -> None:
        """Look at the documents' lengths, read none.

        Raises:
            DataError: the rows would be empty, or there is no document.
        """
        if seq_length < 1:
            raise DataError(f"seq_length is {seq_length}; a row holds 1 token or more")
        self.seed = seed
        self.seq_length = seq_length
        self._lengths = documents.lengths
        if not len(self._lengths):
            raise DataError("the corpus has no document, so there is no row")
        self.tokens_per_pass = int(self._lengths.sum())
        self.rows_per_pass = max(1, self.tokens_per_pass // seq_length)
        self._recent = RecentDocuments(documents)
        self._shuffle: tuple[int, NDArray[np.int64]] | None = None
        self._pass: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def per_pass(self) -> int:
        """Rows in one pass; tokens behind the last whole row of a pass begin the next one."""
        return self.rows_per_pass

    def count_pass(self) -> int:
        """Rows in one pass."""
        return self.per_pass

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of samples [first, first + count): `seq_length` each."""
        return np.full(count, self.seq_length, dtype=np.int64)

    def sample(self, number: int) -> tuple[Piece, ...]:
        """The pieces of sample `number`, the global index that training counts.

        Every `rows_per_pass` samples are as many consecutive rows in shuffled order, so each row comes once.

        Raises:
            DataError: the number is negative, or a document cannot be read.
        """
        if number < 0:
            raise DataError(f"sample {number} does not exist; samples are counted from 0")
        turn, place = divmod(number, self.rows_per_pass)
        if self._shuffle is None or self._shuffle[0] != turn:
            self._shuffle = (turn, epoch_order(self.rows_per_pass, self.seed, turn, ROWS))
        return self.row(turn * self.rows_per_pass + int(self._shuffle[1][place]))

    def row(self, number: int) -> tuple[Piece, ...]:
        """The pieces of row `number`, in order; together they have `seq_length` tokens.

        Raises:
            DataError: the number is negative, or a document cannot be read.
        """
        if number < 0:
            raise DataError(f"row {number} does not exist; rows are counted from 0")
        pieces: list[Piece] = []
        missing = self.seq_length
        epoch, offset = divmod(number * self.seq_length, self.tokens_per_pass)
        while missing:
            order, ends = self._order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            while missing and place < len(order):
                document = int(order[place])
                start = offset - int(ends[place] - self._lengths[document])
                stop = min(start + missing, int(self._lengths[document]))
                piece = self._recent.piece(document, start, stop)
                pieces.append(piece)
                missing -= len(piece)
                offset += len(piece)
                place += 1
            epoch, offset = epoch + 1, 0
        return tuple(pieces)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The documents of a pass in order, and where each ends in the pass's token stream."""
        if self._pass is None or self._pass[0] != epoch:
            order = epoch_order(len(self._lengths), self.seed, epoch)
            self._pass = (epoch, order, np.cumsum(self._lengths[order]))
        return self._pass[1], self._pass[2]
