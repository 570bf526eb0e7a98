"""Documents of a stream as samples: shuffled in blocks, found again by skipping to the block (paper §8, data).

Shape legend: `T` tokens of a document.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.document_samples import LongDocuments
from hetero_megatron.data.documents import Stream
from hetero_megatron.data.order import block_order
from hetero_megatron.data.piece import Piece, cut
from hetero_megatron.errors import DataError

Block = list[NDArray[np.int64]]


class StreamSamples:
    """Sample k is the k-th document of the endless passes over a stream, in blocks that are shuffled by the seed.

    Unlike DocumentSamples, whose samples are pieces, a sample is a whole document with all its pieces: how many
    pieces the documents before it have is not known without reading them. A pass ends where the stream ends.
    Whoever goes on from sample k skips to its block; once the first pass is over, its length is looked for first.
    """

    def __init__(
        self,
        stream: Stream,
        seed: int,
        seq_length: int,
        long_documents: LongDocuments = "split",
        shuffle_buffer: int = 1024,
    ) -> None:
        """Nothing is read.

        Raises:
            DataError: seq_length or shuffle_buffer is not positive.
        """
        if seq_length < 1 or shuffle_buffer < 1:
            raise DataError(f"seq_length {seq_length} and shuffle_buffer {shuffle_buffer} must be positive")
        self.stream, self.seed, self.seq_length = stream, seed, seq_length
        self.long_documents, self.shuffle_buffer = long_documents, shuffle_buffer
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._kept = 3
        # The block that comes next, and from where: an open file that is read in two processes loses rows in both.
        self._reading: tuple[tuple[int, int, int], Iterator[NDArray[np.int64]]] | None = None
        self._per_pass: int | None = None

    @property
    def per_pass(self) -> None:
        """Not known."""
        return None

    def count_pass(self) -> int:
        """Documents of a pass, found by going through the stream.

        Raises:
            DataError: the stream has no document.
        """
        if self._per_pass is None:
            self._find_end(0, None)
        assert self._per_pass is not None, "the end of the stream was looked for"
        return self._per_pass

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of samples [first, first + count), for which they are read; 0 for a document that is dropped."""
        self._kept = max(self._kept, count // self.shuffle_buffer + 3)
        lengths = [len(self._document(number)) for number in range(first, first + count)]
        return np.array(lengths, dtype=np.int64)

    def sample(self, number: int) -> tuple[Piece, ...]:
        """All pieces of sample `number`, none if it is dropped.

        Raises:
            DataError: the number is negative, or the stream has no document.
        """
        if number < 0:
            raise DataError(f"sample {number} does not exist; samples are counted from 0")
        tokens_T = self._document(number)
        starts = range(0, len(tokens_T), self.seq_length)
        return tuple(
            cut(tokens_T, start, min(start + self.seq_length, len(tokens_T)), number) for start in starts
        )

    def _document(self, number: int) -> NDArray[np.int64]:
        """The document of sample `number`, as the policy leaves it."""
        epoch, place = 0, number
        if self._per_pass is None:
            block, inside = divmod(number, self.shuffle_buffer)
            found = self._block(0, block)
            if inside < len(found):
                return found[inside]
            self._find_end(block * self.shuffle_buffer, found)
        epoch, place = divmod(number, self.count_pass())
        block, inside = divmod(place, self.shuffle_buffer)
        documents = self._block(epoch, block)
        if inside >= len(documents):
            raise DataError(
                f"the stream ended after {block * self.shuffle_buffer + len(documents)} documents in pass {epoch}, and "
                f"had {self._per_pass} before; every pass must have the same documents"
            )
        return documents[inside]

    def _block(self, epoch: int, block: int) -> Block:
        """The documents of a block in shuffled order; fewer than shuffle_buffer, or none, where the stream ends."""
        key = (epoch, block)
        if key not in self._blocks:
            process = os.getpid()
            if self._reading is None or self._reading[0] != (process, epoch, block):
                self._reading = (
                    (process, epoch, block),
                    self.stream.read(epoch, block * self.shuffle_buffer),
                )
            documents = [self._limited(each) for each in islice(self._reading[1], self.shuffle_buffer)]
            self._reading = ((process, epoch, block + 1), self._reading[1])
            order = block_order(len(documents), self.seed, epoch, block)
            self._blocks[key] = [documents[place] for place in order.tolist()]
            while len(self._blocks) > self._kept:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _limited(self, tokens_T: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.long_documents == "split" or len(tokens_T) <= self.seq_length:
            return tokens_T
        return tokens_T[: self.seq_length if self.long_documents == "truncate" else 0]

    def _find_end(self, first: int, block: Block | None) -> None:
        """How many documents a pass has: they end in, or before, the block of pass 0 that begins with `first`."""
        if block:
            self._per_pass = first + len(block)
            return
        low, high = 0, max(1, first)  # a document `low` may exist; `high` exists once it was seen to
        if block is None:
            while self._exists(high):
                low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._exists(middle) else (low, middle)
        if low == 0 and not self._exists(0):
            raise DataError("the stream has no document")
        self._per_pass = low + 1

    def _exists(self, number: int) -> bool:
        return next(iter(self.stream.read(0, number)), None) is not None
