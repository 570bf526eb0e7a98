"""Regions as slices of local shards, and shards as flat messages."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hetero_megatron.annotation import Region
from hetero_megatron.annotation.region import Bounds

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
Tensors = Sequence[Tensor]


def local_slices(region: Region, shape: Shape, shard: Bounds) -> Slices:
    """Where `region` of a tensor of full `shape` lies inside the shard with global `shard` bounds."""
    return tuple(
        slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(region.bounds(shape), shard, strict=True)
    )


def covers(slices: Slices, bounds: Bounds) -> bool:
    """Whether the slices take the whole shard."""
    return all(s.start == 0 and s.stop == hi - lo for s, (lo, hi) in zip(slices, bounds, strict=True))


def pack(tensors: Tensors, slices: Sequence[Slices]) -> Tensor:
    """The slices of the tensors, flat and one after the other; no copy when it is one contiguous tensor."""
    parts = [tensor[part].reshape(-1) for tensor, part in zip(tensors, slices, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(buffer: Tensor, tensors: Tensors, slices: Sequence[Slices]) -> None:
    """The inverse of `pack`."""
    at = 0
    for tensor, part in zip(tensors, slices, strict=True):
        target = tensor[part]
        target.copy_(buffer[at : at + target.numel()].view(target.shape))
        at += target.numel()


def count(slices: Sequence[Slices]) -> int:
    """Number of elements in all slices together."""
    return sum(prod(span.stop - span.start for span in part) for part in slices)


def located(region: Region, shapes: Sequence[Shape], shards: Sequence[Bounds]) -> list[Slices]:
    """Where `region` lies in each of several tensors' shards."""
    return [local_slices(region, shape, shard) for shape, shard in zip(shapes, shards, strict=True)]
