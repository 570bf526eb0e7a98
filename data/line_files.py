"""Files of one document per line: JSON objects, or bare text, also compressed by gzip.

A shard is a range of bytes and has the lines that start in it, so large files are shared among processes without
being read first. A line ends at a line feed; line numbers are counted only when a message needs one.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from hetero_megatron.data.records import Raw, Shard, described, no_text, not_utf8
from hetero_megatron.errors import DataError

_BLOCK = 2**20
_UTF8_MARK = b"\xef\xbb\xbf"
# First bytes of files that are something else than their name says, and what to do about them.
_FOREIGN = (
    (b"\x1f\x8b", "is a gzip file", "name it {path}.gz, or unpack it"),
    (b"\x28\xb5\x2f\xfd", "is a Zstandard file", "unpack it"),
    (b"PK\x03\x04", "is a zip file", "unpack it"),
    (b"PAR1", "is a parquet file", "name it .parquet, or set format: parquet"),
    (b"\xff\xfe", "is UTF-16 text (it starts with FF FE)", "convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16 text (it starts with FE FF)", "convert it to UTF-8"),
)


class LineFiles:
    """Lines of text files, or of files with a JSON object per line; a JSON file may also be one array of objects."""

    def __init__(self, paths: tuple[str, ...], kind: Literal["json", "text"], text_key: str = "text") -> None:
        """Look at the first bytes of every file.

        Raises:
            DataError: a file cannot be read, or is no text in UTF-8.
        """
        self._paths = paths
        self._kind = kind
        self._key = text_key
        self._arrays = tuple(_look_at(path, kind) for path in paths)

    @property
    def names(self) -> tuple[str, ...]:
        """The files."""
        return self._paths

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return self._paths

    @property
    def identity(self) -> str:
        """The kind of file and the key of the text."""
        return f"{self._kind} {self._key}"

    def unit(self, file: int) -> str:
        """A line, or an element of an array."""
        return "element" if self._arrays[file] else "line"

    def before(self, shard: Shard) -> int:
        """How many lines the shard's file has before it."""
        return _lines_before(self._paths[shard.file], shard.first)

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Parts of about `size` bytes, in order; arrays and compressed files are one part each."""
        found: list[Shard] = []
        for number, path in enumerate(self._paths):
            whole = Path(path).stat().st_size
            step = max(1, whole) if self._arrays[number] or path.endswith(".gz") else size
            found += [
                Shard(number, first, min(first + step, whole), min(step, whole - first))
                for first in range(0, whole, step)
            ]
        return tuple(found)

    def read(self, shard: Shard) -> Iterator[Raw]:
        """The records of a shard, in order; a blank line of a JSON file is an empty one.

        Raises:
            DataError: the file cannot be read.
        """
        path = self._paths[shard.file]
        try:
            if self._arrays[shard.file]:
                yield from self._elements(path)
            else:
                yield from self._lines(path, shard)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is a damaged or incomplete gzip file: {error}") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def _lines(self, path: str, shard: Shard) -> Iterator[Raw]:
        for place, line in enumerate(_between(path, shard.first, shard.stop)):
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            if not place and not shard.first:
                content = content.removeprefix(_UTF8_MARK)
            if self._kind == "text":
                yield Raw(place, content)
            elif not content or content.isspace():
                yield Raw(place)
            else:
                yield self._of_json(place, content)

    def _of_json(self, place: int, line: bytes) -> Raw:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            mended = self._of_text(place, line.decode("utf-8", "replace"))
            if mended.fault:
                return Raw(place, fault=f"{not_utf8(error)}{mended.fault}")
            return Raw(place, fault=not_utf8(error), mended=str(mended.text))
        return self._of_text(place, text)

    def _of_text(self, place: int, line: str) -> Raw:
        try:
            return self._of_value(place, json.loads(line))
        except (ValueError, RecursionError) as error:
            hint = "; each line must be one JSON object" if place == 0 else ""
            return Raw(place, fault=f" is not JSON: {error}{hint}")

    def _of_value(self, place: int, row: object) -> Raw:
        if not isinstance(row, dict):
            return Raw(
                place, fault=f' is {described(row)}, not an object with the key "{self._key}" (text_key)'
            )
        text = row.get(self._key)
        return Raw(place, text) if isinstance(text, str) else Raw(place, fault=no_text(self._key, row))

    def _elements(self, path: str) -> Iterator[Raw]:
        with _opened(path) as file:
            content = file.read()
        try:
            rows = json.loads(content.removeprefix(_UTF8_MARK).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}{not_utf8(error)}; a JSON array is read whole, so no element can be skipped"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} starts as a JSON array, but is not JSON: {error}") from error
        yield from (self._of_value(place, row) for place, row in enumerate(rows))


def _look_at(path: str, kind: str) -> bool:
    """Whether the file is a JSON array; refuse what is no text."""
    try:
        with _opened(path) as file:
            head = file.read(64)
    except (OSError, EOFError, zlib.error) as error:
        if path.endswith(".gz") and not getattr(error, "strerror", None):
            raise DataError(f"{path} is no gzip file, or a damaged one: {error}") from error
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    for mark, what, remedy in _FOREIGN:
        if head.startswith(mark):
            raise DataError(f"{path} {what}, and UTF-8 text was expected; {remedy.format(path=path)}")
    if kind == "json" and b"\0" in head[:4]:
        raise DataError(
            f"{path} is UTF-16 or UTF-32 text without a mark, and UTF-8 was expected; convert it to UTF-8"
        )
    return kind == "json" and head.removeprefix(_UTF8_MARK).lstrip().startswith(b"[")


def _opened(path: str) -> BinaryIO:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _between(path: str, first: int, stop: int) -> Iterator[bytes]:
    """The lines that start at bytes [first, stop) of a file; all lines of a compressed one."""
    with _opened(path) as file:
        if path.endswith(".gz"):
            yield from file
            return
        at = first
        if first:
            file.seek(first - 1)
            at += len(file.readline()) - 1
        while at < stop and (line := file.readline()):
            at += len(line)
            yield line


def _lines_before(path: str, first: int) -> int:
    """How many lines start before byte `first`."""
    if not first:
        return 0
    count, left = 0, first - 1
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, _BLOCK))):
            count += block.count(b"\n")
            left -= len(block)
    return count + 1
