"""Raw documents before they are tokens: where each stands, and what becomes of those that are not text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from hetero_megatron.errors import DataError

Policy: TypeAlias = Literal["stop", "skip", "replace"]
_REMEDY = "(bad_documents: skip leaves such documents out and counts them"


@dataclass(frozen=True, slots=True)
class Raw:
    """One record: its place in the shard, and its text; or what is wrong with it, and the text mended if it can be."""

    place: int
    text: str | bytes = ""
    fault: str = ""
    mended: str | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a file that is read in one go: bytes, rows or row groups [first, stop), and how much work it is."""

    file: int
    first: int
    stop: int
    size: int


class Reader(Protocol):
    """Records of one or more files. Shards follow from the files alone, so work can be shared and resumed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files in messages, by the number that a shard has."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The files whose sizes and times tell whether something has changed."""
        ...

    @property
    def identity(self) -> str:
        """What else the records follow from."""
        ...

    def unit(self, file: int) -> str:
        """What a record of a file is: a key of UNITS."""
        ...

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Parts of about `size` bytes, in order."""
        ...

    def before(self, shard: Shard) -> int:
        """How many records the shard's file has before it; only messages need it."""
        ...

    def read(self, shard: Shard) -> Iterator[Raw]:
        """The records of a shard, in order, blank ones too."""
        ...


# What a record is, and how its number is told. Editors count lines from 1; data libraries count rows from 0.
UNITS = {
    "line": (1, "{file} line {number}"),
    "row": (0, "{file} row {number} (counted from 0)"),
    "element": (0, "{file} element {number} (counted from 0)"),
    "file": (0, "{file}"),
}


def record_name(names: Sequence[str], file: int, unit: str, number: int) -> str:
    """A record's name in messages, such as `corpus.jsonl line 3` for number 2; of whole files, the number's file."""
    first, text = UNITS[unit]
    return text.format(file=names[number if unit == "file" else file], number=first + number)


def told_of(reader: Reader) -> str:
    """A reader's name in messages: its first file, and how many more."""
    names = reader.names
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(slots=True)
class Counts:
    """What became of the records that were read; `first_bad` says where the first bad one is and what it has."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0
    first_bad: str = ""

    @property
    def records(self) -> int:
        """All that were read."""
        return self.documents + self.empty + self.bad

    def add(self, other: "Counts") -> None:
        """Count those of a later part as well."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_bad = self.first_bad or other.first_bad

    def __str__(self) -> str:
        """As a sentence's part: `5 documents, 20 tokens; left out: 2 empty, 1 bad (the first: ...)`."""
        first = f" (the first: {self.first_bad})" if self.first_bad else ""
        left = [f"{self.empty:,} empty"] * bool(self.empty) + [f"{self.bad:,} bad{first}"] * bool(self.bad)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens"
            + f"; left out: {', '.join(left)}" * bool(left)
            + f"; {self.replaced:,} with invalid characters replaced" * bool(self.replaced)
        )


NUMBERS = ("documents", "tokens", "empty", "bad", "replaced")


def texts(reader: Reader, shard: Shard, policy: Policy, counts: Counts) -> Iterator[tuple[int, str]]:
    """The texts of a shard that are not empty, each with its place in the shard; what was left out or mended is counted.

    Raises:
        DataError: a record has no valid text, and the policy is to stop.
    """
    for raw in reader.read(shard):
        text, fault, mended = ("", raw.fault, raw.mended) if raw.fault else _decoded(raw.text)
        if fault and policy == "stop":
            also = "" if mended is None else "; replace mends them"
            raise DataError(f"{_name(reader, shard, raw)}{fault} {_REMEDY}{also})")
        if fault and policy == "replace" and mended is not None:
            text, fault = mended, ""
            counts.replaced += 1
        if fault:
            counts.bad += 1
            counts.first_bad = counts.first_bad or f"{_name(reader, shard, raw)}{fault}"
        elif not text:
            counts.empty += 1
        else:
            yield raw.place, text


def _name(reader: Reader, shard: Shard, raw: Raw) -> str:
    number = reader.before(shard) + raw.place
    return record_name(reader.names, shard.file, reader.unit(shard.file), number)


def _decoded(text: str | bytes) -> tuple[str, str, str | None]:
    """The text; or what is wrong with it, and the text with U+FFFD for what is not valid."""
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8"), "", None
        if not text.isascii():
            text.encode("utf-8")
        return text, "", None
    except UnicodeDecodeError as error:
        return "", not_utf8(error), error.object.decode("utf-8", "replace")
    except UnicodeEncodeError as error:
        half = (
            f"character {error.start + 1} of the text is half of a pair, U+{ord(error.object[error.start]):X}"
        )
        whole = error.object.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return "", f" is not valid Unicode: {half}", whole


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes, to be put behind a name."""
    return f" is not UTF-8: byte {error.start + 1} of it is {error.object[error.start]:02X}"


def no_text(key: str, row: Mapping[str, object]) -> str:
    """What is wrong with a row whose column `key` is no text, to be put behind a name."""
    columns = f"the columns of this row: {', '.join(row) or 'none'}"
    if key not in row:
        return f': there is no column "{key}" (text_key); {columns}'
    return f': column "{key}" (text_key) is {described(row[key])}; {columns}'


def described(value: object) -> str:
    """What a value is that should have been something else, such as `a number (5)`."""
    if value is None:
        return "null"
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "text",
    }
    shown = repr(value)
    return f"{kinds.get(type(value), f'a {type(value).__name__}')} ({shown[:40]}{'...' if len(shown) > 40 else ''})"


def library_error(error: Exception) -> str:
    """The first line of a library's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
