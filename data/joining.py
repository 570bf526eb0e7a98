"""Parts of a corpus become one .bin/.idx pair, in their order; names are given last (paper §8, data)."""

import os
from collections.abc import Sequence
from pathlib import Path

from hetero_megatron.data.indexed import IndexedWriter, id_dtype, pair
from hetero_megatron.data.part import Part, PartFiles, unwritable
from hetero_megatron.data.prepared import FileRecords, Sidecar, beside
from hetero_megatron.data.records import Counts, Reader, Shard, told_of
from hetero_megatron.data.tokenizer import Tokenizer
from hetero_megatron.errors import DataError


def join_parts(
    reader: Reader,
    tokenizer: Tokenizer,
    shards: Sequence[Shard],
    parts: Sequence[tuple[PartFiles, Part]],
    prefix: str | Path,
    fingerprint: str,
) -> Sidecar:
    """Write the pair, `PREFIX.origins`, and `PREFIX.json` last; whatever fails leaves nothing behind.

    Raises:
        DataError: there is no document, or a file cannot be written.
        OSError: a name cannot be given.
    """
    counts, largest, largest_document = Counts(), -1, -1
    for _, part in parts:
        if part.largest > largest:
            largest, largest_document = part.largest, counts.documents + part.largest_document
        counts.add(part.counts)
    if not counts.documents:
        raise DataError(f"{told_of(reader)} has no document with text: {counts}")
    # From here on, a pair without a .json is an unfinished one.
    beside(prefix, ".json").unlink(missing_ok=True)
    documents = _write(reader, tokenizer, shards, parts, prefix)
    told: dict[str, str | int] = {
        "name": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
    }
    files = tuple(
        FileRecords(name, reader.unit(file), documents[file]) for file, name in enumerate(reader.names)
    )
    size = counts.tokens * id_dtype(tokenizer.vocab_size).itemsize
    sidecar = Sidecar(fingerprint, told, files, counts, size, largest, largest_document)
    new = beside(prefix, ".json.tmp")
    new.write_text(sidecar.to_json(), encoding="utf-8")
    os.replace(new, beside(prefix, ".json"))
    return sidecar


def _write(
    reader: Reader,
    tokenizer: Tokenizer,
    shards: Sequence[Shard],
    parts: Sequence[tuple[PartFiles, Part]],
    prefix: str | Path,
) -> list[int]:
    """Write the pair and the numbers of its records; return the documents of each file."""
    documents = [0] * len(reader.names)
    writer, origins = IndexedWriter(prefix, tokenizer.vocab_size), beside(prefix, ".origins.tmp")
    try:
        with origins.open("wb") as file:
            before, of_file = 0, -1
            for shard, (files, part) in zip(shards, parts, strict=True):
                lengths, places = files.lengths_and_places()
                writer.add_file(files.ids, lengths)
                whole = reader.unit(shard.file) == "file"
                if whole or shard.file != of_file:
                    before, of_file = shard.first if whole else 0, shard.file
                file.write((places + before).astype("<i8").tobytes())
                before += part.counts.records
                documents[shard.file] += part.counts.documents
        writer.finish()
        os.replace(origins, beside(prefix, ".origins"))
    except BaseException as error:
        writer.abandon()
        origins.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(pair(prefix)[0], error) from error
        raise
    return documents
