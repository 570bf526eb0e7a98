"""The files of a run's checkpoints: which there are, which of them are complete, and how one is finished (DESIGN §5).

    latest_checkpointed_iteration.txt    the iteration of the last save, for people and for Megatron's tools
    iter_0000010/                        one checkpoint
      __0_0.distcp ...                   tensors, one file per rank that writes any (torch.distributed.checkpoint)
      .metadata                          which part of which tensor lies where
      state.json                         everything that is no tensor
      complete.json                      the marker, written last: every file's size and CRC-32

A folder without its marker is no checkpoint, whatever it holds. Nothing here knows ranks or tensors.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_megatron.errors import CheckpointError

MARKER, STATE, METADATA = "complete.json", "state.json", ".metadata"
POINTER = "latest_checkpointed_iteration.txt"
ASIDE = ".aside"
_FORMAT = "hetero_megatron checkpoint"
_NAME = re.compile(r"iter_(\d{7,})")
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file of a checkpoint must be: its size in bytes and the CRC-32 of its content."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of `complete.json`: the iteration, and every other file of the folder by name."""

    iteration: int
    files: Mapping[str, FileFacts]

    @property
    def digest(self) -> int:
        """A number that differs between two checkpoints."""
        return zlib.crc32(self.to_json().encode())

    def to_json(self) -> str:
        """The text of the file."""
        files = {name: asdict(facts) for name, facts in sorted(self.files.items())}
        content = {"format": _FORMAT, "version": 1, "iteration": self.iteration, "files": files}
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> "Marker":
        """The marker of the checkpoint folder `path`.

        Raises:
            CheckpointError: there is none, or it is not one of this library's.
        """
        file = path / MARKER
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} has no {MARKER}: it is no checkpoint of this library, or its save was never finished"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        try:
            if content["format"] != _FORMAT or content["version"] != 1:
                raise KeyError
            files = {str(name): FileFacts(**facts) for name, facts in content["files"].items()}
            return Marker(int(content["iteration"]), files)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise CheckpointError(
                f"{file} is not the marker of a {_FORMAT} of version 1; another program, or a newer version, wrote it"
            ) from None


def folder_of(folder: Path, iteration: int) -> Path:
    """The folder of one checkpoint inside the folder of all of them."""
    return folder / f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """The iteration that a folder's name says, None when it is no name of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """Folders named like checkpoints by ascending iteration, complete or not."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = {number: path for path in folder.iterdir() if (number := iteration_of(path)) is not None}
        return dict(sorted(found.items()))
    return {}


def finished(folder: Path) -> dict[int, Path]:
    """Checkpoints that have a marker, by ascending iteration."""
    return {number: path for number, path in checkpoints(folder).items() if (path / MARKER).is_file()}


def unfinished(folder: Path) -> tuple[Path, ...]:
    """Folders in which a save has begun and not ended."""
    return tuple(path for path in checkpoints(folder).values() if not (path / MARKER).is_file())


def read_pointer(folder: Path) -> str | None:
    """The text of the pointer file without blanks around it; None when there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (folder / POINTER).read_text(encoding="utf-8", errors="replace").strip()
    return None


def checksum(path: Path) -> FileFacts:
    """Size and CRC-32 of a file, read in blocks."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return FileFacts(size, crc)


def write_durably(path: Path, text: str) -> FileFacts:
    """Put `text` in place of the file `path` in one go: a crash leaves the old content or the new."""
    content = text.encode()
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return FileFacts(len(content), zlib.crc32(content))


def sync_folder(path: Path) -> None:
    """Make new and renamed entries of a folder last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finish(folder: Path, marker: Marker) -> None:
    """Turn the written files of an iteration into its checkpoint: remove what does not belong, marker, pointer."""
    path = folder_of(folder, marker.iteration)
    for entry in path.iterdir():
        if entry.name not in marker.files:
            remove(entry)
    write_durably(path / MARKER, marker.to_json())
    sync_folder(folder)
    write_durably(folder / POINTER, f"{marker.iteration}\n")


def tidy(folder: Path, iteration: int, keep_last: int) -> Iterator[str]:
    """After the save of `iteration`: remove unfinished saves and all but the newest `keep_last` checkpoints.

    Yields:
        What could not be removed, in words; a leftover is no reason to stop a run.
    """
    done = list(finished(folder).values())
    for path in (*unfinished(folder), *done[: max(0, len(done) - keep_last)]):
        if iteration_of(path) != iteration:
            try:
                remove(path)
            except OSError as error:
                yield f"{path} could not be removed: {error}"
    (folder / (POINTER + ".tmp")).unlink(missing_ok=True)


def set_aside(folder: Path, after: int) -> tuple[Path, ...]:
    """Rename finished checkpoints of later iterations than `after`, which a run that goes on from there has left."""
    moved = []
    for number, path in finished(folder).items():
        if number > after:
            target = path.with_name(path.name + ASIDE)
            if target.exists():
                remove(target)
            path.rename(target)
            moved.append(target)
    return tuple(moved)


def remove(path: Path) -> None:
    """Remove a file or folder, the marker first: what is half removed must not look complete."""
    if path.is_dir() and not path.is_symlink():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def numbers(values: Iterable[int]) -> str:
    """`5, 10`, or `none`."""
    return ", ".join(str(value) for value in values) or "none"
