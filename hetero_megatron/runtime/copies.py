"""Copies of optimizer shards that a rank alone holds, in host memory of another one: its guardian (`losses.guardians`).

A guardian is sent the gradients of its ward's shard before the ranks agree on a step, and makes the ward's update as
its own: a third of what the new weights and moments would be, and there is no moment at which the copy is behind.
The update runs in a thread, behind the next step.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.program import Program
from hetero_megatron.runtime.bind import placements
from hetero_megatron.runtime.optimizer import AdamKernel, OptimizerSettings, fused_adamw, update
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, State, lay_out
from hetero_megatron.runtime.world import World

_TAG = 71


class Copies:
    """What this rank keeps of others, by ward, and what it sends to its own guardian."""

    def __init__(
        self,
        program: Program,
        world: World,
        state: State,
        kept: Mapping[int, int],
        settings: OptimizerSettings,
        adam: AdamKernel | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`kept`: guardians by ward, the same on every rank. Nothing is sent."""
        self._world, self._state, self._settings = world, state, settings
        self._adam = adam or fused_adamw
        self.guardian = kept.get(world.rank)
        self.shadows = {
            ward: _shadow(program, ward, bucket_elements)
            for ward, guardian in sorted(kept.items())
            if guardian == world.rank
        }
        self._thread = ThreadPoolExecutor(1, "copies") if self.shadows else None
        self._running: Future[None] | None = None

    def fill(self) -> None:
        """Collective over the program's ranks: copies of master weights and moments as they are now."""
        for name in ("master", *self._state.moments):
            self._exchange(name)
        for shadow in self.shadows.values():
            shadow.step = self._state.step

    def exchange(self) -> None:
        """Collective, when gradients are synchronised and nobody has updated anything: they go to the guardians."""
        self.wait()
        self._exchange("gradient")

    def _exchange(self, name: str) -> None:
        world = self._world
        works = [
            dist.irecv(shadow.flats[name], group=world.control, tag=_TAG, group_src=world.ranks.index(ward))
            for ward, shadow in self.shadows.items()
        ]
        kept: Tensor | None = None
        if self.guardian is not None:
            kept = self._state.flats[name].detach().cpu()
            place = world.ranks.index(self.guardian)
            works.append(dist.isend(kept, group=world.control, tag=_TAG, group_dst=place))
        for work in works:
            if work is not None:
                work.wait()

    def update(self, lr: float, divisor: float) -> None:
        """The step counts: make the wards' updates as they make theirs, behind whatever comes next, if anything does."""
        if self._thread is not None:
            self._running = self._thread.submit(self._update, lr, divisor)
        else:
            self._update(lr, divisor)

    def _update(self, lr: float, divisor: float) -> None:
        for shadow in self.shadows.values():
            update(shadow, self._settings, lr, divisor, self._adam)

    def wait(self) -> None:
        """Until the copies are those of the last step that counts."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def let_go(self) -> None:
        """Forget everything that holds a connection; the copies stay."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        del self._world


def _shadow(program: Program, rank: int, bucket_elements: int) -> State:
    """The master weights, moments and gradients of another rank, without parameters."""
    buckets = lay_out(rank, placements(program, program.executable(rank)), bucket_elements)
    state = State(buckets, torch.float32, torch.device("cpu"), held=False)
    used = [state.master, state.gradient, *state.moments.values()]
    spare = [name for name, flat in state.flats.items() if not any(flat is other for other in used)]
    state.release(*spare)
    return state
