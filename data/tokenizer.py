"""Bytes as tokens: nothing to train, nothing to download, nothing that cannot be encoded."""

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """Token ids 0-255 are the bytes themselves; 256 ends a document.

    >>> ByteTokenizer().encode(b"ab").tolist()
    [97, 98, 256]
    """

    vocab_size = VOCAB_SIZE

    def length(self, size: int) -> int:
        """How many tokens a document of `size` bytes has, known without reading it."""
        return size + 1

    def encode(self, document: bytes) -> NDArray[np.int64]:
        """The document's tokens, the end token included."""
        tokens_T = np.empty(len(document) + 1, dtype=np.int64)
        tokens_T[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens_T[-1] = END_OF_DOCUMENT
        return tokens_T

    def decode(self, tokens: NDArray[np.int64]) -> bytes:
        """The bytes of `tokens`, end tokens left out."""
        return tokens[tokens != END_OF_DOCUMENT].astype(np.uint8).tobytes()
