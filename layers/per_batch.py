"""Something computed once per micro-batch and shared by all layers that need it, without global state."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from hetero_megatron.runtime.batch import Segments

Value = TypeVar("Value")


class PerBatch(Generic[Value]):
    """The value of the latest micro-batch, made again for other Segments, another device or dtype."""

    def __init__(self, make: Callable[[Segments, torch.device, torch.dtype], Value]) -> None:
        self._make = make
        self._latest: tuple[Segments, torch.device, torch.dtype, Value] | None = None

    def __call__(self, segments: Segments, device: torch.device, dtype: torch.dtype) -> Value:
        """The value for these Segments: the same object means the same micro-batch."""
        latest = self._latest
        if latest is None or latest[0] is not segments or latest[1] != device or latest[2] != dtype:
            latest = (segments, device, dtype, self._make(segments, device, dtype))
            self._latest = latest
        return latest[3]
