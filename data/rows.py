"""Packed rows: fixed-length pieces of the endless token stream of all documents (paper §8, packing).

Row r holds tokens [r*S, (r+1)*S) of the stream; sample k is a row, chosen by a shuffle of rows so that one
step does not see one long document only. Both follow from the corpus, the seed and S, and from nothing that a
parallel strategy says: two strategies, or a run and its resumption, train on the same samples.

Shape legend: `T` tokens of a piece, `S` tokens of a row.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.corpus import Corpus
from hetero_megatron.data.order import ROWS, epoch_order
from hetero_megatron.data.tokenizer import ByteTokenizer
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE

KEPT_DOCUMENTS = 64


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


class PackedRows:
    """Rows of `seq_length` tokens over a corpus; a row reads only the documents it touches.

    Each document ends with the end token. A target is the next token of the same document, also across a row
    border; a document's last token has no target.
    """

    def __init__(
        self, corpus: Corpus, seed: int, seq_length: int, tokenizer: ByteTokenizer | None = None
    ) -> None:
        """Read the corpus's sizes, no document.

        Raises:
            DataError: the rows would be empty, or the corpus is.
        """
        if seq_length < 1:
            raise DataError(f"seq_length is {seq_length}; a row holds 1 token or more")
        if not len(corpus):
            raise DataError("the corpus has no document, so there is no row")
        self.corpus = corpus
        self.seed = seed
        self.seq_length = seq_length
        self.tokenizer = tokenizer or ByteTokenizer()
        lengths = [self.tokenizer.length(corpus.size(index)) for index in range(len(corpus))]
        self._lengths = np.array(lengths, dtype=np.int64)
        self.tokens_per_pass = int(self._lengths.sum())
        self.rows_per_pass = max(1, self.tokens_per_pass // seq_length)
        self._shuffle: tuple[int, NDArray[np.int64]] | None = None
        self._pass: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._kept: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

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
                piece = self._piece(document, start, missing)
                pieces.append(piece)
                missing -= len(piece)
                offset += len(piece)
                place += 1
            epoch, offset = epoch + 1, 0
        return tuple(pieces)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The documents of a pass in order, and where each ends in the pass's token stream."""
        if self._pass is None or self._pass[0] != epoch:
            order = epoch_order(len(self.corpus), self.seed, epoch)
            self._pass = (epoch, order, np.cumsum(self._lengths[order]))
        return self._pass[1], self._pass[2]

    def _piece(self, document: int, start: int, most: int) -> Piece:
        """Up to `most` tokens of `document` from token `start` on."""
        tokens_T = self._tokens(document)
        stop = min(start + most, len(tokens_T))
        targets_T = np.full(stop - start, IGNORE, dtype=np.int64)
        following = tokens_T[start + 1 : stop + 1]
        targets_T[: len(following)] = following
        return Piece(document, tokens_T[start:stop], targets_T)

    def _tokens(self, document: int) -> NDArray[np.int64]:
        """The document's tokens; the most recently used documents are kept."""
        if document not in self._kept:
            self._kept[document] = self.tokenizer.encode(self.corpus.read(document))
            while len(self._kept) > KEPT_DOCUMENTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(document)
        return self._kept[document]
