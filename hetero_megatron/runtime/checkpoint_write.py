"""Writing the tensor files of a checkpoint in torch.distributed.checkpoint's format, with sizes and checksums.

The checksum is taken of what was meant to be written, while it is written, so a file that a disk changes is found.
"""

import contextlib
import errno
import io
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_files import (
    METADATA,
    STATE,
    FileFacts,
    Marker,
    finish,
    finished,
    folder_of,
    refuse_foreign_checkpoints,
    write_durably,
)
from hetero_megatron.runtime.checkpoint_header import Header
from hetero_megatron.runtime.checkpoint_parts import MASTER, Part, metadata_of

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Cancelled(Exception):
    """The save was given up because another rank's part of it failed."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written: its files, and per part, in the order of the parts, file, offset and bytes."""

    files: Mapping[str, FileFacts]
    places: tuple[tuple[str, int, int], ...]


def could_not_write(path: Path, error: OSError, written: int | None = None) -> CheckpointError:
    """A failure of the file system in words: where, and that there is no space, if that is the reason."""
    reason = error.strerror or str(error)
    after = "" if written is None else f" after {written} bytes"
    if error.errno in _FULL:
        return CheckpointError(f"no space to write {path}: {reason}{after}; free some, or keep fewer")
    return CheckpointError(f"{path} cannot be written: {reason}{after}")


class _Stream(io.RawIOBase):
    """Counts and sums up what passes. The first failure is kept and not raised: it would leave torch's writer in C++
    with a half-written archive, which reports stream positions in its place."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__()
        self._file = file
        self.size = self.crc = 0
        self.error: OSError | None = None

    def write(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        rest = view
        try:
            while rest and self.error is None:
                count = self._file.write(rest)
                rest = rest[count or 0 :]
        except OSError as error:
            self.error = error
        self.crc = zlib.crc32(view, self.crc)
        self.size += len(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self._file.fileno()


class _Files(FileSystem):
    """The file system of a writer that remembers sizes and checksums by name."""

    def __init__(self) -> None:
        self.facts: dict[str, FileFacts] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A stream into the file.

        Raises:
            CheckpointError: at its end, when something could not be written.
        """
        path = Path(path)
        try:
            with cast(io.FileIO, path.open(mode, buffering=0)) as file:
                stream = _Stream(file)
                yield stream
                if stream.error is not None:
                    raise could_not_write(path, stream.error, file.tell())
                self.facts[path.name] = FileFacts(stream.size, stream.crc)
        except OSError as error:
            raise could_not_write(path, error) from None


class _Tensors(SavePlanner):
    """Gives the writer its tensors; what to write is known without planning together."""

    def __init__(
        self,
        tensors: Mapping[MetadataIndex, Tensor],
        cancelled: threading.Event,
        amid: Callable[[], None] | None = None,
    ) -> None:
        self._tensors, self._cancelled, self._amid, self._count = tensors, cancelled, amid, 0

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._cancelled.is_set():
            raise Cancelled
        self._count += 1
        if self._amid is not None and self._count == 2:
            self._amid()
        return self._tensors[write_item.index]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return all_plans, None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


class _Writer(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        self.files = _Files()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        """Without the folder's path, which says nothing once the folder has moved."""
        return StorageMeta()


def write_parts(
    path: Path,
    writer: int,
    parts: Sequence[Part],
    tensors: Mapping[tuple[str, str], Tensor],
    cancelled: threading.Event | None = None,
    amid: Callable[[], None] | None = None,
) -> Written:
    """Write parts into the file of writer number `writer` in folder `path`, and wait until they are on the disk.

    `tensors` are the parts by kind and name. `amid` is called when some of them are written, and some are not.

    Raises:
        CheckpointError: the file system refused; naming the file.
        Cancelled: `cancelled` was set meanwhile.
    """
    if not parts:
        return Written({}, ())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise could_not_write(path, error) from None
    out = _Writer(path)
    # The writer's own way to give each plan its file name.
    plans = [SavePlan([])] * writer + [SavePlan([part.write_item for part in parts])]
    plan = out.prepare_global_plan(plans)[writer]
    by_index = {part.index: tensors[part.kind, part.name] for part in parts}
    results = out.write_data(plan, _Tensors(by_index, cancelled or threading.Event(), amid)).wait()
    places = {result.index: result.storage_data for result in results}
    found = [places[part.index] for part in parts]
    return Written(out.files.facts, tuple((each.relative_path, each.offset, each.length) for each in found))


def write_contents(path: Path, header: Header, parts: Sequence[Part], written: Iterable[Written]) -> Marker:
    """Write `.metadata` and `state.json` beside the tensor files; returns the marker that is still missing.

    `parts` are those of all writers, one after the other, as `written` are.

    Raises:
        CheckpointError: the file system refused, or the parts do not add up.
    """
    files: dict[str, FileFacts] = {}
    results = []
    left = iter(parts)
    for each in written:
        files |= each.files
        for place in each.places:
            results.append(_result(next(left), *place))
    out = _Writer(path)
    out.finish(metadata_of(parts), [results])
    files[METADATA] = out.files.facts[METADATA + ".tmp"]
    try:
        files[STATE] = write_durably(path / STATE, header.to_json())
    except OSError as error:
        raise could_not_write(path / STATE, error) from None
    return Marker(header.iteration, files)


def _result(part: Part, file: str, offset: int, length: int) -> WriteResult:
    return WriteResult(part.index, length, _StorageInfo(file, offset, length))


def write_whole(
    folder: Path, iteration: int, payload: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> Path:
    """A checkpoint of weights alone, written by one process, one tensor in memory at a time; returns its folder.

    A run that starts from it begins with moments of 0. Tensors are stored in FP32, each in a file of its own.

    Raises:
        CheckpointError: the file system refused, a name came twice, or there is a checkpoint of that iteration or of
            another program.
    """
    path = folder_of(folder, iteration)
    refuse_foreign_checkpoints(folder)
    if iteration in finished(folder):
        raise CheckpointError(f"{path} exists and is complete; choose another folder or iteration")
    parts: list[Part] = []
    written: list[Written] = []
    for number, (name, tensor) in enumerate(tensors):
        shape = tuple(tensor.shape)
        part = Part(MASTER, name, shape, tuple((0, size) for size in shape))
        if any(part.name == other.name for other in parts):
            raise CheckpointError(f"{name} came twice among the tensors to write")
        value = {(MASTER, name): tensor.detach().to("cpu", torch.float32).contiguous()}
        written.append(write_parts(path, number, (part,), value))
        parts.append(part)
    shapes = {part.name: part.full_shape for part in parts}
    header = Header(iteration, 0, 0, (MASTER,), shapes, payload)
    marker = write_contents(path, header, parts, written)
    try:
        finish(folder, marker)
    except OSError as error:
        raise could_not_write(path, error) from None
    return path
