"""From pieces to a micro-batch: concatenated, padded by a segment of its own (paper §6.3, A.2).

`packed` needs numpy only, so that a process without torch's devices can prepare what `PackedTokens.on` makes a
micro-batch of.

Shape legend: `T` packed tokens of the micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_megatron.data.piece import Piece, piece_of
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE, PAD, MicroBatch, Segments, on_device

__all__ = ["PackedTokens", "pack", "packed", "piece_of"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """One micro-batch as arrays of the host; `lengths` of its segments, of which `padding` tokens are the last."""

    tokens_T: NDArray[np.int32]
    targets_T: NDArray[np.int32]
    lengths: tuple[int, ...]
    padding: int

    def on(self, device: torch.device | str) -> MicroBatch:
        """The micro-batch on `device`."""
        ends = np.cumsum((0, *self.lengths))
        positions_T = np.arange(ends[-1]) - np.repeat(ends[:-1], self.lengths)
        segments = Segments(_tensor(positions_T, device), tuple(ends.tolist()))
        return MicroBatch(_tensor(self.tokens_T, device), _tensor(self.targets_T, device), segments)


def packed(pieces: Iterable[Piece], multiple: int = 1) -> PackedTokens:
    """The pieces of one or more samples one after another; every piece is a segment with its own positions.

    T is padded up to a multiple of `multiple` (tokens must divide over sequence-parallel ranks). The padding
    is a segment of its own, with token id 0 and no target: no real token sees it and none of it counts.

    Raises:
        DataError: there is no token, or `multiple` is not positive.
    """
    kept = [piece for piece in pieces if len(piece)]
    if multiple < 1:
        raise DataError(f"tokens cannot be padded to a multiple of {multiple}; 1 means no padding")
    if not kept:
        raise DataError("a micro-batch without a token cannot be packed; give it at least one row")
    lengths = [len(piece) for piece in kept]
    padding = -sum(lengths) % multiple
    tokens_T = _joined([piece.tokens_T for piece in kept], padding, PAD)
    targets_T = _joined([piece.targets_T for piece in kept], padding, IGNORE)
    return PackedTokens(tokens_T, targets_T, (*lengths, padding) if padding else tuple(lengths), padding)


def pack(pieces: Iterable[Piece], multiple: int = 1, device: torch.device | str = "cpu") -> MicroBatch:
    """`packed`, on `device`.

    Raises:
        DataError: there is no token, or `multiple` is not positive.
    """
    return packed(pieces, multiple).on(device)


def _joined(parts: list[NDArray[np.int64]], padding: int, filler: int) -> NDArray[np.int32]:
    """The parts one after another, then `padding` times `filler`; ids of a vocabulary fit into 32 bits."""
    joined = np.full(sum(map(len, parts)) + padding, filler, dtype=np.int32)
    np.concatenate(parts, out=joined[: len(joined) - padding], casting="same_kind")
    return joined


def _tensor(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device | str) -> torch.Tensor:
    return on_device(torch.from_numpy(array.astype(np.int64)), device)
