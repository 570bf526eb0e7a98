"""Files as documents of bytes: lengths follow from the sizes, and a document is read when it is asked for (paper §8)."""

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.corpus import Corpus
from hetero_megatron.data.tokenizer import ByteTokenizer


class ByteDocuments:
    """The documents of a corpus under the byte tokenizer; nothing is read before `tokens`."""

    def __init__(self, corpus: Corpus, tokenizer: ByteTokenizer | None = None) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer or ByteTokenizer()
        lengths = [self.tokenizer.length(corpus.size(index)) for index in range(len(corpus))]
        self._lengths = np.array(lengths, dtype=np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, the end token included."""
        return self._lengths

    def name(self, index: int) -> str:
        """The file's name."""
        return self.corpus.name(index)

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The document's bytes and the end token.

        Raises:
            DataError: the file is gone, unreadable, or has another size than when the corpus was opened.
        """
        return self.tokenizer.encode(self.corpus.read(index))

    def part(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the document; only their bytes are read.

        Raises:
            DataError: as for `tokens`.
        """
        last = min(stop, int(self._lengths[index]) - 1)
        tokens_T = self.tokenizer.encode(self.corpus.read_part(index, min(start, last), last))
        return tokens_T[: stop - start]
