"""Text to token ids; and bytes as tokens: nothing to train, nothing to download, nothing that cannot be encoded."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


class Tokenizer(Protocol):
    """What turns a document's text into ids. Every document ends with the end token, and none has a start token."""

    @property
    def name(self) -> str:
        """Where it comes from: `byte` or a path."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def end_of_document(self) -> int:
        """The id of the end token."""
        ...

    def encode(self, document: str | bytes) -> NDArray[np.int64]:
        """The document's ids, the end token included."""
        ...

    def decode(self, tokens: NDArray[np.int64]) -> str | bytes:
        """The text of `tokens`, end tokens left out."""
        ...


class ByteTokenizer:
    """Token ids 0-255 are the bytes themselves; 256 ends a document.

    >>> ByteTokenizer().encode(b"ab").tolist()
    [97, 98, 256]
    """

    name = "byte"
    fingerprint = "byte"
    vocab_size = VOCAB_SIZE
    end_of_document = END_OF_DOCUMENT

    def length(self, size: int) -> int:
        """How many tokens a document of `size` bytes has, known without reading it."""
        return size + 1

    def encode(self, document: str | bytes) -> NDArray[np.int64]:
        """The document's tokens (of text: its UTF-8 bytes), the end token included."""
        if isinstance(document, str):
            document = document.encode("utf-8")
        tokens_T = np.empty(len(document) + 1, dtype=np.int64)
        tokens_T[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens_T[-1] = END_OF_DOCUMENT
        return tokens_T

    def decode(self, tokens: NDArray[np.int64]) -> bytes:
        """The bytes of `tokens`, end tokens left out."""
        return tokens[tokens != END_OF_DOCUMENT].astype(np.uint8).tobytes()
