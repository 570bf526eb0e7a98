"""What of a model's state each rank writes, by global name and offsets, in the words of torch.distributed.checkpoint.

Every element is written by one rank, the first that holds it (`state.is_counted`). That follows from the strategy
alone, so every rank knows what every other one writes and nobody has to ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hetero_megatron.annotation.region import Bounds
from hetero_megatron.errors import CheckpointError
from hetero_megatron.program import Program
from hetero_megatron.runtime.state import Shape, is_counted

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Part:
    """A box of one tensor: `kind` is `master`, `exp_avg` or `exp_avg_sq`, all FP32; `bounds` are global."""

    kind: str
    name: str
    full_shape: Shape
    bounds: Bounds

    @property
    def key(self) -> str:
        """The tensor's name in the checkpoint."""
        return key_of(self.kind, self.name)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box as torch.distributed.checkpoint says it."""
        return chunk_of(self.bounds)

    @property
    def index(self) -> MetadataIndex:
        """The box's name in the checkpoint."""
        return MetadataIndex(self.key, self.chunk.offsets)

    @property
    def write_item(self) -> WriteItem:
        """The order to write it."""
        data = TensorWriteData(self.chunk, TensorProperties(dtype=torch.float32), torch.Size(self.full_shape))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=data)


def key_of(kind: str, name: str) -> str:
    """`exp_avg.layers.0.wq.weight`: what a nested dictionary {kind: {name: tensor}} is flattened to."""
    return f"{kind}.{name}"


def chunk_of(bounds: Bounds) -> ChunkStorageMetadata:
    """Offsets and sizes of a box."""
    return ChunkStorageMetadata(torch.Size(lo for lo, _ in bounds), torch.Size(hi - lo for lo, hi in bounds))


def shapes_of(program: Program) -> dict[str, Shape]:
    """The model's parameters and their global shapes."""
    graph = program.annotated.graph
    return {name: graph.parameter_shape(name) for name in graph.parameters}


def parts_of(program: Program, rank: int, kinds: Sequence[str]) -> tuple[Part, ...]:
    """What `rank` writes, in an order that every rank knows."""
    boxes = []
    for name, shape in shapes_of(program).items():
        annotation = program.annotated.states[name]
        if is_counted(annotation, rank):
            bounds = annotation.region(rank).bounds(shape)
            if all(lo < hi for lo, hi in bounds):
                boxes.append((name, shape, bounds))
    return tuple(Part(kind, *box) for kind in kinds for box in boxes)


def metadata_of(parts: Sequence[Part]) -> Metadata:
    """The table of contents of a checkpoint with these parts.

    Raises:
        CheckpointError: the parts of a tensor do not add up to it.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    sizes: dict[str, int] = {}
    # So that torch's own tools make {kind: {name: tensor}} of it.
    paths: dict[str, tuple[str, str]] = {}
    for part in parts:
        key, chunk = part.key, part.chunk
        if key not in tensors:
            properties = TensorProperties(dtype=torch.float32)
            tensors[key] = TensorStorageMetadata(properties, torch.Size(part.full_shape), [])
            paths[key], sizes[key] = (part.kind, part.name), 0
        tensors[key].chunks.append(chunk)
        sizes[key] += prod(chunk.sizes)
    for key, tensor in tensors.items():
        if sizes[key] != prod(tensor.size):
            raise CheckpointError(
                f"{key}: the parts that ranks wrote have {sizes[key]} elements, the tensor {prod(tensor.size)}"
            )
    return Metadata(dict(tensors), planner_data=paths)
