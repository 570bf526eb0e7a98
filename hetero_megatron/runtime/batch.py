"""What one micro-batch is: packed tokens and the documents they belong to (paper §6.3, A.2).

Shape legend: `T` packed tokens of the micro-batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hetero_megatron.runtime.context import ContextShare

# The target of a token that predicts nothing, and the id of a token that only fills up.
IGNORE, PAD = -100, 0


def on_device(made: Tensor, device: torch.device | str) -> Tensor:
    """A tensor that was made on the host, on `device`; for a GPU it is copied while the host goes on.

    An ordinary copy to a GPU waits until everything before it is done, which is once per micro-batch too often.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


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
        return Segments(on_device(torch.cat(positions), device), tuple(ends))

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
    def valid_tokens(self) -> Tensor:
        """Number of targets that count in the loss, a scalar on the device: to read it is to wait for the device."""
        return (self.targets_T != IGNORE).sum()
