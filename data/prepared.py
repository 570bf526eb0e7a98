"""Tokenized documents on disk: a Megatron .bin/.idx pair, and beside it what it was made from.

`PREFIX.json` says which tokenizer and files; `PREFIX.origins` has the number of each document's record (8 bytes each),
so that messages can name its line. A pair without them is one that another program has written.
"""

import json
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from hetero_megatron.data.documents import Documents
from hetero_megatron.data.indexed import IndexedDocuments, pair
from hetero_megatron.data.records import Counts, record_name
from hetero_megatron.data.token_check import CheckedDocuments
from hetero_megatron.errors import DataError

FORMAT = "hetero-megatron data 1"
# A pair of unknown ids is read whole when it is opened, if that takes a second; a larger one is checked bit by bit.
SCANNED_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class FileRecords:
    """A file of the corpus: what a record of it is, and how many of its records became documents."""

    name: str
    unit: str
    documents: int


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What stands in `PREFIX.json`. `largest_document` is the first document that has the largest id."""

    fingerprint: str
    tokenizer: dict[str, str | int]
    files: tuple[FileRecords, ...]
    counts: Counts
    bytes: int
    largest: int
    largest_document: int

    def to_json(self) -> str:
        """As text, with a line for each file."""
        value = asdict(self)
        files = ",\n  ".join(json.dumps(file) for file in value.pop("files"))
        head = json.dumps({"format": FORMAT, **value}, indent=1)
        return f'{head[:-2]},\n "files": [\n  {files}\n ]\n}}\n'

    @staticmethod
    def of(prefix: str | Path) -> "Sidecar | None":
        """The one beside a pair; None if there is none, or another program's.

        Raises:
            DataError: it is ours, and damaged.
        """
        path = beside(prefix, ".json")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
                return None
        except (OSError, ValueError):
            return None
        try:
            files = tuple(FileRecords(**file) for file in value.pop("files"))
            return Sidecar(files=files, counts=Counts(**value.pop("counts")), **value)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({error}); remove it together with its .bin and .idx"
            ) from error

    def name(self, document: int, record: int) -> str:
        """The name of a document that was record number `record` of its file."""
        ends = list(accumulate(file.documents for file in self.files))
        file = int(np.searchsorted(ends, document, side="right"))
        return record_name([each.name for each in self.files], file, self.files[file].unit, record)


def beside(prefix: str | Path, suffix: str) -> Path:
    """The file of this suffix that belongs to a pair."""
    path = pair(prefix)[0]
    return path.with_name(path.name.removesuffix(".bin") + suffix)


def open_prepared(prefix: str | Path, vocab_size: int) -> Documents:
    """The documents of a pair, whose ids are found to be in the vocabulary: now, or if nobody knows, when read.

    Raises:
        DataError: the pair is damaged, or an id is outside the vocabulary.
    """
    sidecar = Sidecar.of(prefix)
    if sidecar is None:
        return _checked(IndexedDocuments(prefix), vocab_size)
    path, origins = pair(prefix)[0], beside(prefix, ".origins")
    records = None
    if origins.is_file() and origins.stat().st_size == 8 * sidecar.counts.documents:
        records = np.memmap(origins, dtype="<i8", mode="r")

    def name(document: int) -> str:
        if records is None:
            return f"{path} document {document}"
        return sidecar.name(document, int(records[document]))

    documents = IndexedDocuments(prefix, name)
    size = path.stat().st_size
    if size != sidecar.bytes or len(documents.lengths) != sidecar.counts.documents:
        raise DataError(
            f"{path} has {size} bytes and {len(documents.lengths)} documents, but {beside(prefix, '.json')} belongs to "
            f"one of {sidecar.bytes} bytes and {sidecar.counts.documents} documents; remove the .json, or prepare again"
        )
    if sidecar.largest >= vocab_size:
        raise DataError(
            f"token id {sidecar.largest} in document {sidecar.largest_document} ({name(sidecar.largest_document)}) of "
            f"{path} is outside the model's vocabulary: vocab_size is {vocab_size}; the data was made with tokenizer "
            f"{sidecar.tokenizer.get('name')}, of {sidecar.tokenizer.get('vocab_size')} entries"
        )
    return documents


def _checked(documents: IndexedDocuments, vocab_size: int) -> Documents:
    """A pair of unknown ids."""
    checked = CheckedDocuments(documents, vocab_size)
    if documents.bytes > SCANNED_BYTES:
        return checked
    if (wrong := documents.first_outside(vocab_size)) is not None:
        checked.tokens(wrong)  # refuses
    return documents
