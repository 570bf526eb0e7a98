"""One shard of a corpus turned into tokens: files that are complete as soon as the last of them has its name."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.indexed import id_dtype, pack_ids
from hetero_megatron.data.records import Counts, Policy, Reader, Shard, texts
from hetero_megatron.data.tokenizer import Tokenizer
from hetero_megatron.errors import DataError

# Texts are encoded together up to this many characters.
_BATCH = 2**19


@dataclass(frozen=True, slots=True)
class Part:
    """What a shard became; `largest_document` is the first document of the part that has the largest id."""

    counts: Counts
    largest: int = -1
    largest_document: int = -1

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Part":
        """Back from text.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        value = json.loads(text)
        return Part(**{**value, "counts": Counts(**value["counts"])})


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files of part `number` in a folder."""

    folder: Path
    number: int

    @property
    def ids(self) -> Path:
        """Token ids of all documents, as they will stand in the .bin."""
        return self.folder / f"{self.number:06}.ids"

    @property
    def table(self) -> Path:
        """Two rows of numbers: tokens of each document, and the place of its record in the shard."""
        return self.folder / f"{self.number:06}.npy"

    @property
    def mark(self) -> Path:
        """What became of the shard; there when the others are complete."""
        return self.folder / f"{self.number:06}.json"

    def read(self, itemsize: int) -> Part | None:
        """The part, if it is complete."""
        try:
            part = Part.from_json(self.mark.read_text(encoding="utf-8"))
            whole = self.ids.stat().st_size == part.counts.tokens * itemsize
            return part if whole and self.table.is_file() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def lengths_and_places(self) -> NDArray[np.int64]:
        """The table."""
        found: NDArray[np.int64] = np.load(self.table)
        return found

    def remove(self) -> None:
        """Remove the files, the mark first."""
        for path in (self.mark, self.ids, self.table):
            path.unlink(missing_ok=True)


def make_part(
    reader: Reader,
    shard: Shard,
    tokenizer: Tokenizer,
    policy: Policy,
    files: PartFiles,
    report: Callable[[int, int, int], None],
) -> Part:
    """Read a shard, encode it, write its files; `report` is told what was done since: documents, tokens, characters.

    Raises:
        DataError: a record is refused, or a file cannot be written.
    """
    dtype = id_dtype(tokenizer.vocab_size)
    counts, told = Counts(), (0, 0)
    lengths: list[int] = []
    places: list[int] = []
    largest, largest_document = -1, -1
    batch: list[tuple[int, str]] = []
    try:
        with files.ids.open("wb") as file:

            def flush() -> None:
                nonlocal largest, largest_document, told
                for place, text in batch:
                    ids = tokenizer.encode(text)
                    if len(ids) < 2:  # nothing but the end token
                        counts.empty += 1
                        continue
                    top = int(ids.max())
                    if top > largest:
                        largest, largest_document = top, len(lengths)
                    lengths.append(len(ids))
                    places.append(place)
                    counts.documents += 1
                    counts.tokens += len(ids)
                    file.write(pack_ids(ids, dtype, f"a document of {reader.names[shard.file]}"))
                report(
                    counts.documents - told[0], counts.tokens - told[1], sum(len(text) for _, text in batch)
                )
                told = (counts.documents, counts.tokens)
                batch.clear()

            size = 0
            for place, text in texts(reader, shard, policy, counts):
                batch.append((place, text))
                size += len(text)
                if size >= _BATCH:
                    flush()
                    size = 0
            flush()
            file.flush()
            os.fsync(file.fileno())
        with files.table.open("wb") as file:
            np.save(file, np.array([lengths, places], dtype=np.int64))
        part = Part(counts, largest, largest_document)
        temporary = files.mark.with_suffix(".tmp")
        temporary.write_text(part.to_json(), encoding="utf-8")
        os.replace(temporary, files.mark)
        return part
    except OSError as error:
        for path in (files.ids, files.table):
            path.unlink(missing_ok=True)
        raise unwritable(files.ids, error) from error


def unwritable(path: Path, error: OSError) -> DataError:
    """What to say when tokens cannot be written."""
    return DataError(
        f"{path} cannot be written: {error.strerror or error}. Finished parts are kept: with space and permission, "
        "the same command goes on from them"
    )
