"""A saved state: any box of any tensor, whatever the layout it was saved from (torch.distributed.checkpoint's format)."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hetero_megatron.annotation.region import Bounds
from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_choice import verify
from hetero_megatron.runtime.checkpoint_files import METADATA, STATE, checksum
from hetero_megatron.runtime.checkpoint_header import Header
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS, chunk_of, key_of, shapes_of
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot, Shape, view


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint that was opened; tensors are read when they are asked for."""

    path: Path
    header: Header
    metadata: Metadata

    @staticmethod
    def open(path: Path) -> "SavedState":
        """The checkpoint in folder `path` (`.../iter_0000010`), its sizes compared with its marker.

        Raises:
            CheckpointError: it is no finished checkpoint of this library, or a file is missing or has another size.
        """
        marker = verify(path)
        for name in (STATE, METADATA):
            if name not in marker.files or checksum(path / name) != marker.files[name]:
                raise CheckpointError(f"{path} is damaged: {name} is not what its marker says")
        return SavedState(path, Header.read(path), _read_contents(path / METADATA))

    @property
    def iteration(self) -> int:
        """How many steps were made."""
        return self.header.iteration

    @property
    def payload(self) -> Mapping[str, Any]:
        """What the trainer saved with it."""
        return self.header.payload

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(self.header.shapes)

    def shape(self, name: str) -> Shape:
        """The global shape of a parameter."""
        return self.header.shapes[name]

    def read(self, name: str, kind: str = MASTER, bounds: Bounds | None = None) -> Tensor:
        """The part within `bounds` (global [lo, hi) per dim; all of it when None), FP32, in host memory.

        Raises:
            CheckpointError: there is no such tensor, or a file does not hold what it should.
        """
        bounds = bounds or tuple((0, size) for size in self.header.shapes.get(name, ()))
        target = torch.empty([max(0, hi - lo) for lo, hi in bounds], dtype=torch.float32)
        self._fill({(kind, name): (bounds, target)})
        return target

    def initial(self, slot: ParameterSlot) -> Tensor:
        """Master weights for a shard: what a Session takes as `initial`."""
        return self.read(slot.name, MASTER, slot.bounds)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Compare with the parameters of the model that is to go on from here (`shapes_of(program)`).

        Raises:
            CheckpointError: naming parameters that are missing, not expected, or of another shape.
        """
        saved = self.header.shapes
        faults = [
            f"{text} {_first(names)}"
            for text, names in (
                ("it has no", [name for name in shapes if name not in saved]),
                ("the model has no", [name for name in saved if name not in shapes]),
            )
            if names
        ]
        faults += [
            f"{name} has shape {list(saved[name])} in it and {list(shape)} in the model"
            for name, shape in shapes.items()
            if name in saved and saved[name] != tuple(shape)
        ][:3]
        if faults:
            raise CheckpointError(f"{self.path} is of another model: {'; '.join(faults)}")

    def restore(self, session: Session, say: Callable[[str], None] = print) -> None:
        """Fill moments and counters of a session that was started with `initial`; nothing is sent.

        `say` is called on the first rank.

        Raises:
            CheckpointError: the checkpoint is of another model, or a file does not hold what it should.
        """
        self.check(shapes_of(session.program))
        state = session.state
        session.iteration = self.header.iteration
        session.skipped_iterations = self.header.skipped_iterations
        state.step = self.header.optimizer_step
        if session.settings.name != "adam":
            return
        if not set(MOMENTS) <= set(self.header.kinds):
            state.step = 0
            if session.world.leads:
                say(f"{self.path} has no optimizer moments: they start at 0, as at the first step of a run")
            return
        self._fill(
            {
                (kind, slot.name): (slot.bounds, view(state.moments[kind], slot))
                for kind in MOMENTS
                for slot in state.slots
            }
        )

    def _fill(self, wanted: Mapping[tuple[str, str], tuple[Bounds, Tensor]]) -> None:
        """Read boxes into tensors of their shape; each file is opened once."""
        items: list[ReadItem] = []
        targets: dict[MetadataIndex, Tensor] = {}
        for (kind, name), (bounds, target) in wanted.items():
            found = self._items(kind, name, bounds)
            items += found
            targets |= {item.dest_index: target for item in found}
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        try:
            reader.read_data(LoadPlan(items), _Into(targets)).wait()
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, AssertionError) as error:
            files = {self.metadata.storage_data[item.storage_index].relative_path for item in items}
            raise CheckpointError(f"{self.path}: {_first(sorted(files))} cannot be read: {error}") from None

    def _items(self, kind: str, name: str, bounds: Bounds) -> Sequence[ReadItem]:
        entry = self.metadata.state_dict_metadata.get(key_of(kind, name))
        if not isinstance(entry, TensorStorageMetadata):
            known = name in self.header.shapes
            what = f"no {kind} of {name}; it has {', '.join(self.header.kinds)}" if known else f"no {name}"
            raise CheckpointError(f"{self.path} has {what}")
        inside = [0 <= lo <= hi <= size for (lo, hi), size in zip(bounds, entry.size, strict=False)]
        if len(bounds) != len(entry.size) or not all(inside):
            raise CheckpointError(f"{name}: bounds {bounds} lie outside the saved shape {list(entry.size)}")
        elements = prod(hi - lo for lo, hi in bounds)
        found = (
            create_read_items_for_chunk_list(key_of(kind, name), entry, [chunk_of(bounds)])
            if elements
            else []
        )
        if sum(prod(item.lengths) for item in found) != elements:
            raise CheckpointError(
                f"{self.path} is damaged: elements of {name} ({kind}) are in none of its files"
            )
        return found


def _read_contents(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            contents = _Contents(stream).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__} {error}") from None
    if not isinstance(contents, Metadata) or not isinstance(contents.storage_data, dict):
        raise CheckpointError(f"{file} cannot be read: it holds no table of contents")
    return contents


def _first(names: Sequence[str]) -> str:
    """`a, b, c and 4 more`."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


class _Into(LoadPlanner):
    """Tells the reader where each piece goes."""

    def __init__(self, targets: Mapping[MetadataIndex, Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was written where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is no tensor")

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


class _Contents(pickle.Unpickler):
    """Reads `.metadata`, which is a pickle, and makes nothing but the values that belong there."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may name.

        Raises:
            CheckpointError: it names something else.
        """
        plain = module == "torch.distributed.checkpoint.metadata" or (module, name) in _KNOWN
        if not plain:
            raise CheckpointError(
                f"{METADATA} names {module}.{name}, which does not belong into a checkpoint"
            )
        return super().find_class(module, name)


_KNOWN = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
}
