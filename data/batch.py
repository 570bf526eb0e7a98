"""From pieces to a micro-batch: concatenated, padded by a segment of its own (paper §6.3, A.2).

Shape legend: `T` packed tokens of the micro-batch.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_megatron.data.rows import Piece
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE, PAD, MicroBatch, Segments, on_device


def piece_of(document: Sequence[int], number: int = 0) -> Piece:
    """A whole document as one piece: each token's target is the next one, the last has none."""
    tokens_T = np.array(document, dtype=np.int64)
    return Piece(number, tokens_T, np.append(tokens_T[1:], np.int64(IGNORE))[: len(tokens_T)])


def pack(pieces: Iterable[Piece], multiple: int = 1, device: torch.device | str = "cpu") -> MicroBatch:
    """One micro-batch out of the pieces of one or more rows; every piece is a segment with its own positions.

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
    segments = Segments.of_lengths((*lengths, padding) if padding else tuple(lengths), device)
    return MicroBatch(on_device(tokens_T, device), on_device(targets_T, device), segments)


def _joined(parts: list[NDArray[np.int64]], padding: int, filler: int) -> torch.Tensor:
    """The parts one after another, then `padding` times `filler`."""
    return torch.from_numpy(np.concatenate([*parts, np.full(padding, filler, dtype=np.int64)]))
