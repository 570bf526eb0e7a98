"""Megatron's pair of files: token ids of all documents in a .bin, their lengths in an .idx (paper §8, data).

The .idx, little-endian: the nine bytes of MAGIC, version 1 (8 bytes), the code of the ids' type (1 byte), the number
of sequences and of document borders (8 bytes each); then tokens per sequence (int32), the byte offset of each in the
.bin (int64), and the document borders (int64): document d is the sequences [border d, border d + 1).
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEAD = struct.Struct("<9sQBQQ")
# Megatron's codes; 6 and 7 are float64 and float32, which are no token ids.
_DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name)
    for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
# Below this many entries, ids are written in two bytes each.
_SMALL_VOCABULARY = 65500
_MOST_TOKENS = 2**31 - 1
_BLOCK = 2**20


def id_dtype(vocab_size: int) -> np.dtype:
    """The type in which Megatron writes the ids of a vocabulary of this size."""
    return np.dtype("<u2") if vocab_size < _SMALL_VOCABULARY else np.dtype("<i4")


def pair(prefix: str | Path) -> tuple[Path, Path]:
    """The .bin and the .idx of a prefix, which may also be the path of one of the two."""
    text = str(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(f"{text}.bin"), Path(f"{text}.idx")


class IndexedDocuments:
    """Documents of a .bin/.idx pair, memory-mapped; a sequence without a token belongs to no document."""

    def __init__(self, prefix: str | Path, name: Callable[[int], str] | None = None) -> None:
        """Read the index. `name` gives the documents' names, counted among those that have tokens.

        Raises:
            DataError: a file is missing, is something else, or does not fit the other one.
        """
        self._bin, index = pair(prefix)
        self._name = name
        for path in (self._bin, index):
            if not path.is_file():
                raise DataError(f"{path} does not exist or is not a file; tokenized data is a .bin/.idx pair")
        self.dtype, tokens, borders = _read_index(index)
        self._file = self._bin.open("rb")
        self.bytes = os.fstat(self._file.fileno()).st_size
        wanted = int(tokens.sum(dtype=np.int64)) * self.dtype.itemsize
        if self.bytes != wanted:
            raise DataError(
                f"{self._bin} has {self.bytes} bytes, but {index} describes {wanted} ({wanted // self.dtype.itemsize}"
                f" tokens of {self.dtype.itemsize} bytes); the pair is incomplete or mixed from two"
            )
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens, dtype=np.int64)])[borders]
        lengths = np.diff(ends)
        kept = lengths > 0
        self._starts: NDArray[np.int64] = ends[:-1][kept]
        self._lengths: NDArray[np.int64] = lengths[kept]
        if not len(self._lengths):
            raise DataError(f"{index} has no document with a token")
        self._ids = np.memmap(self._file, dtype=self.dtype, mode="r")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, the end token counted."""
        return self._lengths

    def name(self, index: int) -> str:
        """The document's name in messages."""
        return self._name(index) if self._name else f"{self._bin} document {index}"

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The document's token ids.

        Raises:
            DataError: the .bin has another size than when it was opened.
        """
        return self.part(index, 0, int(self._lengths[index]))

    def part(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Token ids [start, stop) of the document.

        Raises:
            DataError: as for `tokens`.
        """
        # A mapped page behind the file's end would end the process without a word.
        if (size := os.fstat(self._file.fileno()).st_size) != self.bytes:
            raise DataError(
                f"{self._bin} has {size} bytes, but had {self.bytes} when it was opened; "
                "a corpus must not change during a run"
            )
        first = int(self._starts[index])
        return self._ids[first + start : first + stop].astype(np.int64)

    def first_outside(self, vocab_size: int) -> int | None:
        """The first document with an id outside [0, vocab_size), found by reading everything; None if there is none."""
        wrong = np.maximum.reduceat(self._ids, self._starts) >= vocab_size
        if self.dtype.kind == "i":
            wrong |= np.minimum.reduceat(self._ids, self._starts) < 0
        return int(np.argmax(wrong)) if wrong.any() else None


def _read_index(path: Path) -> tuple[np.dtype, NDArray[np.int32], NDArray[np.int64]]:
    """Type of the ids, tokens per sequence, document borders."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if head[: len(MAGIC)] != MAGIC:
            raise DataError(f"{path} is no Megatron index: it does not start with MMIDIDX")
        if len(head) < _HEAD.size:
            raise DataError(f"{path} is cut off: it has {size} bytes, and its head alone {_HEAD.size}")
        _, version, code, sequences, borders = _HEAD.unpack(head)
        if version != VERSION:
            raise DataError(f"{path} has version {version} of the format; version {VERSION} can be read")
        if code not in _DTYPES:
            raise DataError(
                f"{path} says that ids are of type {code}, which is no whole number; "
                f"known types: {', '.join(f'{known} ({dtype})' for known, dtype in _DTYPES.items())}"
            )
        wanted = _HEAD.size + 12 * sequences + 8 * borders
        if size != wanted:
            raise DataError(
                f"{path} has {size} bytes, but {sequences} sequences and {borders} document borders take {wanted}; "
                "it is cut off, or has a modality per sequence, which is not supported"
            )
        tokens = np.fromfile(file, "<i4", sequences)
        starts = np.fromfile(file, "<i8", sequences)
        documents = np.fromfile(file, "<i8", borders)
    dtype = _DTYPES[code]
    expected = (np.cumsum(tokens, dtype=np.int64) - tokens) * dtype.itemsize
    if (tokens < 0).any() or (starts != expected).any():
        wrong = int(np.argmax((tokens < 0) | (starts != expected)))
        raise DataError(
            f"{path}: sequence {wrong} starts at byte {starts[wrong]} and has {tokens[wrong]} tokens; sequences must "
            f"follow each other, so it should start at byte {expected[wrong]}"
        )
    if borders < 1 or documents[0] or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(f"{path}: the document borders do not lead from 0 to {sequences}, the last sequence")
    return dtype, tokens, documents


class IndexedWriter:
    """Writes a pair document by document; the files get their names when `finish` is called, the .idx last."""

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        """Make `prefix`.bin.tmp; nothing that exists is touched before `finish`.

        Raises:
            OSError: it cannot be made.
        """
        self._paths = pair(prefix)
        self._dtype = id_dtype(vocab_size)
        self._lengths: list[NDArray[np.int64]] = []
        self._documents = 0
        self._file: BinaryIO = _temporary(self._paths[0]).open("wb")

    def add(self, ids: Iterable[int] | NDArray[np.int64]) -> None:
        """One document, end token included.

        Raises:
            DataError: it has no token, or an id that the type of a vocabulary of this size cannot hold.
        """
        values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        if not len(values):
            raise DataError(f"document {self._documents} has no token; leave it out")
        self.add_written(
            pack_ids(values, self._dtype, f"document {self._documents}"), np.array([len(values)])
        )

    def add_written(self, ids: bytes, lengths: NDArray[np.int64]) -> None:
        """Documents whose ids are already bytes of the right type."""
        if len(lengths) and int(lengths.max()) > _MOST_TOKENS:
            raise DataError(
                f"a document of {lengths.max()} tokens is too long; at most {_MOST_TOKENS} can be written"
            )
        self._file.write(ids)
        self._lengths.append(lengths)
        self._documents += len(lengths)

    def add_file(self, path: Path, lengths: NDArray[np.int64]) -> None:
        """Documents whose ids stand in a file, in the right type."""
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                self._file.write(block)
        self.add_written(b"", lengths)

    def finish(self) -> None:
        """Write the index, and give both files their names.

        Raises:
            OSError: they cannot be written.
        """
        _close(self._file)
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        starts = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        code = next(code for code, dtype in _DTYPES.items() if dtype == self._dtype)
        with _temporary(self._paths[1]).open("wb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            for array, dtype in ((lengths, "<i4"), (starts, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
                file.write(array.astype(dtype).tobytes())
            _close(file)
        for path in self._paths:
            os.replace(_temporary(path), path)

    def abandon(self) -> None:
        """Remove what was written so far."""
        with contextlib.suppress(OSError):  # what is still held back does not fit either
            self._file.close()
        for path in self._paths:
            _temporary(path).unlink(missing_ok=True)


def pack_ids(ids: NDArray[np.int64], dtype: np.dtype, told: str) -> bytes:
    """Ids as bytes.

    Raises:
        DataError: one does not fit; `told` says whose it is.
    """
    limits = np.iinfo(dtype)
    if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
        wrong = int(ids.max() if ids.max() > limits.max else ids.min())
        raise DataError(
            f"{told} has token id {wrong}, which does not fit into {dtype.name} ({limits.min} to {limits.max}); "
            "the tokenizer's vocabulary is larger than was said"
        )
    return ids.astype(dtype).tobytes()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _close(file: BinaryIO) -> None:
    """To the disk, so that a name never stands for half a file."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
