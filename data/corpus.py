"""Where documents come from: files whose sizes are known without reading them (paper §8, data)."""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetero_megatron.errors import DataError

# Below the standard library's folder, but not part of it.
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Corpus(Protocol):
    """Numbered documents. Names and sizes cost nothing to ask for; only `read` touches a document."""

    def __len__(self) -> int:
        """How many documents there are."""
        ...

    def name(self, index: int) -> str:
        """The document's name in messages."""
        ...

    def size(self, index: int) -> int:
        """The document's size in bytes."""
        ...

    def read(self, index: int) -> bytes:
        """The document's bytes."""
        ...

    def read_part(self, index: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the document."""
        ...


@dataclass(frozen=True, slots=True)
class Files:
    """One document per file, numbered in the order of the names, on which every rank agrees."""

    root: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise DataError(
                f"the corpus in {self.root} has no document: every file is missing, empty or excluded"
            )

    @staticmethod
    def standard_library() -> "Files":
        """The running Python's own source files: more than a thousand real files of very mixed length."""
        return Files.folder(sysconfig.get_path("stdlib"), suffixes=(".py",))

    @staticmethod
    def folder(root: str | Path, suffixes: tuple[str, ...] = ()) -> "Files":
        """Every non-empty file below `root` whose name ends in one of `suffixes` (if none are given, any).

        Hidden files and folders, installed packages and caches are left out.

        Raises:
            DataError: `root` is no folder, or nothing in it qualifies.
        """
        if not os.path.isdir(root):
            raise DataError(f"the corpus folder {root} does not exist or is not a folder")
        found = sorted(name for name in _walk(str(root)) if not suffixes or name.endswith(suffixes))
        return _sized(str(root), found)

    @staticmethod
    def listed(paths: Iterable[str | Path]) -> "Files":
        """These files in this order; empty ones are left out.

        Raises:
            DataError: a path is no file, or all files are empty.
        """
        names = [str(path) for path in paths]
        for name in names:
            if not os.path.isfile(name):
                raise DataError(f"the corpus file {name} does not exist or is not a file")
        return _sized(".", names)

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.names)

    def name(self, index: int) -> str:
        """The file's name relative to the corpus folder."""
        return self.names[index]

    def path(self, index: int) -> str:
        """The file's path."""
        return os.path.join(self.root, self.names[index])

    def size(self, index: int) -> int:
        """The file's size in bytes when the corpus was opened."""
        return self.sizes[index]

    def read(self, index: int) -> bytes:
        """The file's bytes.

        Raises:
            DataError: the file is gone, unreadable, or has another size than when the corpus was opened.
        """
        return self.read_part(index, 0, self.sizes[index])

    def read_part(self, index: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file; nothing else is read.

        Raises:
            DataError: as in `read`.
        """
        path = self.path(index)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(start)
                content = file.read(stop - start)
        except OSError as error:
            raise DataError(f"document {index} ({path}) cannot be read: {error.strerror}") from error
        if size != self.sizes[index] or len(content) != stop - start:
            raise DataError(
                f"document {index} ({path}) has {size} bytes, but had {self.sizes[index]} when the "
                "corpus was opened; a corpus must not change during a run"
            )
        return content


def _walk(root: str) -> Iterator[str]:
    """Relative names, with forward slashes, of all files below `root` that are not hidden or foreign."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in FOREIGN_FOLDERS and not name.startswith(".")]
        relative = Path(os.path.relpath(folder, root))
        yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def _sized(root: str, names: Iterable[str]) -> Files:
    """The files that exist and are not empty, with their sizes."""
    sizes: dict[str, int] = {}
    for name in names:
        path = os.path.join(root, name)
        if os.path.isfile(path) and (size := os.stat(path).st_size):
            sizes[name] = size
    return Files(root, tuple(sizes), tuple(sizes.values()))
