"""Copies in host memory of what a rank writes, so that training goes on while files are written.

The buffers are kept from save to save. On a GPU they are pinned, and the copies run in the order of its stream: the
next update waits for them there, and nobody else does.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_megatron.runtime.checkpoint_parts import MASTER
from hetero_megatron.runtime.state import State, view

Tensors = Mapping[tuple[str, str], Tensor]


def live(state: State, kinds: Sequence[str]) -> Tensors:
    """The local shards themselves, by kind and name."""
    return {
        (kind, slot.name): view(flat, slot) for kind, flat in _flats(state, kinds) for slot in state.slots
    }


def _flats(state: State, kinds: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(kind, state.master if kind == MASTER else state.moments[kind]) for kind in kinds]


class Snapshot:
    """Kept buffers for the shards that this rank writes, and copies in them."""

    def __init__(self, state: State, kinds: Sequence[str]) -> None:
        self._state, self._kinds = state, tuple(kinds)
        self._slots = [slot for slot in state.slots if slot.counted]
        self._runs: list[slice] = []
        for slot in self._slots:
            if self._runs and self._runs[-1].stop == slot.offset:
                self._runs[-1] = slice(self._runs[-1].start, slot.offset + slot.elements)
            else:
                self._runs.append(slice(slot.offset, slot.offset + slot.elements))
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        """What the buffers take, or will take after the first copy."""
        return 4 * len(self._kinds) * sum(run.stop - run.start for run in self._runs)

    def take(self) -> Tensors:
        """Copy; the result may be read when `wait` has returned, until the next `take`."""
        cuda = self._state.device.type == "cuda"
        size = sum(run.stop - run.start for run in self._runs)
        for kind, flat in _flats(self._state, self._kinds):
            if kind not in self._buffers:
                self._buffers[kind] = torch.empty(size, dtype=torch.float32, pin_memory=cuda)
            at = 0
            for run in self._runs:
                length = run.stop - run.start
                self._buffers[kind][at : at + length].copy_(flat[run], non_blocking=True)
                at += length
        if cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._views()

    def _views(self) -> Tensors:
        found, at = {}, 0
        for slot in self._slots:
            for kind, buffer in self._buffers.items():
                found[kind, slot.name] = buffer[at : at + slot.elements].view(slot.shape)
            at += slot.elements
        return found

    def wait(self) -> None:
        """Until the copies are made; for the thread that reads them."""
        if self._copied is not None:
            self._copied.synchronize()
