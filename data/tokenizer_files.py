"""Tokenizers from files: a Hugging Face tokenizer.json or its folder, or a SentencePiece .model.

The ids are those of the text alone, without any start token, followed by the end token.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.tokenizer import ByteTokenizer, Tokenizer
from hetero_megatron.errors import DataError

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

JSON, MODEL = "tokenizer.json", "tokenizer.model"
_KNOWN = f"byte, a {JSON} or a folder with one, a SentencePiece .model file or a folder with {MODEL}"


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `byte`, or the one in a file or folder.

    Raises:
        DataError: it does not exist, cannot be read, has no end token, or its library is not installed.
    """
    if name == "byte":
        return ByteTokenizer()
    path = tokenizer_file(name)
    return SentencePieceTokenizer(name, path) if path.suffix == ".model" else JsonTokenizer(name, path)


def tokenizer_file(name: str) -> Path:
    """The file behind a tokenizer's name.

    Raises:
        DataError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        for file in (JSON, MODEL):
            if (path / file).is_file():
                return path / file
        raise DataError(f"tokenizer {name}: the folder has neither {JSON} nor {MODEL}")
    if not path.is_file():
        raise DataError(f"tokenizer {name} does not exist; a tokenizer is {_KNOWN}")
    if path.suffix not in (".json", ".model"):
        raise DataError(f"tokenizer {name} is neither a .json nor a .model file; a tokenizer is {_KNOWN}")
    return path


class JsonTokenizer:
    """A tokenizer of the library `tokenizers`; `path` is its tokenizer.json."""

    def __init__(self, name: str, path: Path) -> None:
        """Read it, and find its end token in the files beside it.

        Raises:
            DataError: it cannot be read, or has no end token.
        """
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise DataError(
                f"tokenizer {name} needs the package tokenizers: pip install tokenizers"
            ) from error
        content = _content(path)
        try:
            self._library: tokenizers.Tokenizer = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(f"tokenizer {path} cannot be read: {error}") from error
        # What the file says of these is meant for fine-tuning, and would cut documents in silence.
        self._library.no_truncation()
        self._library.no_padding()
        self.name = name
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = _end_of(path, self._library, self.vocab_size)
        self.fingerprint = hashlib.sha256(content + b"%d" % self.end_of_document).hexdigest()

    def encode(self, document: str | bytes) -> NDArray[np.int64]:
        """The document's ids, the end token included."""
        # One document each, although in the form for many: it leaves out offsets, which cost a quarter of the time.
        text = _text(document)
        ids = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return np.array([*ids, self.end_of_document], dtype=np.int64)

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """The text of `tokens`, special tokens left out."""
        return self._library.decode(tokens.tolist(), skip_special_tokens=True)


class SentencePieceTokenizer:
    """A tokenizer of the library `sentencepiece`; `path` is its .model."""

    def __init__(self, name: str, path: Path) -> None:
        """Read it.

        Raises:
            DataError: it cannot be read, or has no end token.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise DataError(
                f"tokenizer {name} needs the package sentencepiece: pip install sentencepiece"
            ) from error
        content = _content(path)
        try:
            self._library: sentencepiece.SentencePieceProcessor = SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises bare RuntimeErrors
            raise DataError(f"tokenizer {path} cannot be read as a SentencePiece model") from error
        self.name = name
        self.vocab_size = int(self._library.get_piece_size())
        self.end_of_document = int(self._library.eos_id())
        if self.end_of_document < 0:
            raise DataError(
                f"tokenizer {path} has no end token (eos): documents could not be told apart; "
                "train the model with --eos_id"
            )
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, document: str | bytes) -> NDArray[np.int64]:
        """The document's ids, the end token included."""
        return np.array([*self._library.encode(_text(document)), self.end_of_document], dtype=np.int64)

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """The text of `tokens`, end tokens left out."""
        return str(self._library.decode([int(token) for token in tokens if token != self.end_of_document]))


def _end_of(path: Path, library: "tokenizers.Tokenizer", vocab_size: int) -> int:
    """The end token: the tokenizer's own, else what text generation stops at; of several the first."""
    folder = path.parent
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _settings(folder / file).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            entry = library.token_to_id(text)
            if entry is None:
                raise DataError(f"{folder / file} names the eos_token {text!r}, which {path} does not have")
            return int(entry)
    for file in ("generation_config.json", "config.json"):
        number = _settings(folder / file).get("eos_token_id")
        if isinstance(number, list) and number:
            number = number[0]
        if isinstance(number, int):
            if not 0 <= number < vocab_size:
                raise DataError(
                    f"{folder / file} says eos_token_id {number}, but {path} has ids 0 to {vocab_size - 1} only"
                )
            return number
    raise DataError(
        f"tokenizer {path} has no end token (eos): documents could not be told apart; write "
        f'{{"eos_token": "</s>"}}, or whichever token of its vocabulary ends a text, into {folder / "tokenizer_config.json"}'
    )


def _settings(path: Path) -> dict[str, object]:
    """What a settings file beside a tokenizer says; nothing if there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_content(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _text(document: str | bytes) -> str:
    return document if isinstance(document, str) else document.decode("utf-8")
