"""What a source's path stands for: files of which kind, a saved dataset, a .bin/.idx pair, or a name of the hub."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from hetero_megatron.data.corpus import Files
from hetero_megatron.data.indexed import pair
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.records import Reader
from hetero_megatron.data.saved import open_hub, open_saved
from hetero_megatron.data.tables import ParquetFiles
from hetero_megatron.data.whole_files import WholeFiles
from hetero_megatron.errors import DataError

Format: TypeAlias = Literal["auto", "files", "json", "parquet", "text", "saved", "megatron", "hub"]
_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "json": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".txt.gz"),
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_KNOWN = "a folder, a .json, .jsonl, .parquet or .txt file or pattern, a saved dataset, or the prefix of a .bin/.idx pair"


def format_of(path: str) -> Format:
    """What `auto` means for a path; nothing is opened.

    Raises:
        DataError: the path does not tell.
    """
    if glob.has_magic(path) and not os.path.exists(path):
        found = {_by_suffix(each) for each in _matches(path)}
        if len(found) > 1 or found == {None}:
            raise DataError(
                f"source {path} matches files of different or unknown kinds; set format, or a narrower pattern"
            )
        return next(each for each in found if each)
    if os.path.isdir(path):
        saved = any((Path(path) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
        return "saved" if saved else "files"
    if path.endswith((".bin", ".idx")) or any(each.is_file() for each in pair(path)):
        return "megatron"
    kind = _by_suffix(path)
    if os.path.isfile(path):
        if kind is None:
            raise DataError(
                f"source {path}: its name does not tell what it is; set format to json, parquet, text (a document per "
                "line) or files (a document per file)"
            )
        return kind
    if kind is None and _HUB_NAME.fullmatch(path):
        return "hub"
    raise DataError(f"source {path} does not exist; a source is {_KNOWN}")


def open_reader(
    paths: Sequence[str],
    kind: Format,
    *,
    suffixes: tuple[str, ...] = (),
    text_key: str = "text",
    split: str = "train",
    config: str | None = None,
    stream: bool = False,
) -> Reader:
    """The records behind paths of one kind.

    Raises:
        DataError: a path does not exist, is something else than it should be, or kinds are mixed.
    """
    if kind == "auto":
        kinds = {path: format_of(path) for path in paths}
        kind = kinds[paths[0]]
        for path, other in kinds.items():
            if other != kind:
                raise DataError(f"{paths[0]} is {kind} and {path} is {other}; make two sources of them")
    if kind in ("saved", "hub", "megatron") and len(paths) > 1:
        raise DataError(f"{paths[0]} and {paths[1]} are each a corpus of their own; make two sources of them")
    path = paths[0]
    if kind == "saved":
        return open_saved(path, split, text_key)
    if kind == "hub":
        return open_hub(path, config, split, text_key, stream)
    if kind == "megatron":
        raise DataError(f"{path} is tokenized already; it cannot be read as text")
    if kind == "files":
        return WholeFiles(open_files(paths, suffixes))
    files = tuple(file for each in paths for file in _files(each, kind))
    if kind == "parquet":
        return ParquetFiles(files, text_key)
    return LineFiles(files, "json" if kind == "json" else "text", text_key)


def open_files(paths: Sequence[str], suffixes: tuple[str, ...] = ()) -> Files:
    """Files that are a document each: those of a folder, those that match a pattern, or those listed.

    Raises:
        DataError: there is none.
    """
    if len(paths) == 1 and os.path.isdir(paths[0]):
        return Files.folder(paths[0], suffixes)
    found = [each for path in paths for each in _matches(path)]
    return Files.listed([each for each in found if not suffixes or each.endswith(suffixes)])


def _files(path: str, kind: Format) -> list[str]:
    """The files of a kind behind a path: a folder's by suffix, a pattern's, or the one."""
    if os.path.isdir(path):
        found = sorted(str(each) for each in Path(path).rglob("*") if each.name.endswith(_SUFFIXES[kind]))
        if not found:
            raise DataError(f"source {path} has no file that ends in {', '.join(_SUFFIXES[kind])}")
        return found
    return _matches(path)


def _matches(path: str) -> list[str]:
    """The file, or the files that match a pattern, in the order of their names."""
    if os.path.exists(path) or not glob.has_magic(path):
        if not os.path.isfile(path):
            raise DataError(f"source {path} does not exist or is not a file")
        return [path]
    found = sorted(each for each in glob.glob(path, recursive=True) if os.path.isfile(each))
    if not found:
        raise DataError(f"source {path} matches no file")
    return found


def _by_suffix(path: str) -> Format | None:
    return next((kind for kind, suffixes in _SUFFIXES.items() if path.endswith(suffixes)), None)
