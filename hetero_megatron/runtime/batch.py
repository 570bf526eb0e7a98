"""What one micro-batch is: packed tokens and the documents they belong to (paper §6.3, A.2).

Shape legend: `T` packed tokens of the micro-batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hetero_megatron.runtime.context import ContextShare

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Segments:
    """Documents inside a packed micro-batch: position of every token, and where each document ends.

    `cu_seqlens` starts with 0 and ends with T; attention never crosses its borders. In a context-parallel part,
    T counts the part's own tokens, and `context` says how its documents go on in the other parts.
    """

    positions_T: Tensor
    cu_seqlens: tuple[int, ...]
    context: "ContextShare | None" = None

    @staticmethod
    def of_lengths(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> "Segments":
        """Segments of consecutive documents with these lengths in tokens."""
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        positions = [torch.arange(length) for length in lengths] or [torch.zeros(0, dtype=torch.int64)]
        return Segments(torch.cat(positions).to(device), tuple(ends))

    @property
    def tokens(self) -> int:
        """Number of packed tokens, padding included."""
        return self.cu_seqlens[-1]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of one pipeline: token ids, targets (`IGNORE` where nothing is predicted), segments."""

    tokens_T: Tensor
    targets_T: Tensor
    segments: Segments

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets_T != IGNORE).sum())
