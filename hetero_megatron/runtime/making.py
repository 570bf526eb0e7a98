"""What the sessions of an elastic run are made of, whatever their program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hetero_megatron.losses import guardians
from hetero_megatron.program import Program
from hetero_megatron.runtime.binding import Kernels
from hetero_megatron.runtime.copies import Copies
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import BUCKET_ELEMENTS
from hetero_megatron.runtime.world import Groups, World


@dataclass(frozen=True)
class Making:
    """What sessions are made of besides their program and world; `modules` makes the model's leaves anew."""

    modules: Callable[[], Mapping[str, nn.Module]]
    settings: OptimizerSettings
    dtype: torch.dtype = torch.float32
    kernels: Kernels | None = None
    bucket_elements: int = BUCKET_ELEMENTS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 600.0
    local: bool = True
    copies: bool = False

    def kept(self, program: Program) -> dict[int, int]:
        """Guardians by ward, where this run keeps copies."""
        return guardians(program) if self.copies else {}

    def guard(self, session: Session) -> None:
        """Collective over the session's ranks: copies of what a rank alone holds."""
        if kept := self.kept(session.program):
            session.copies = Copies(
                session.program,
                session.world,
                session.state,
                kept,
                self.settings,
                session.adam,
                self.bucket_elements,
            )
            session.copies.fill()

    def session(self, program: Program, world: World, groups: Groups) -> Session:
        """A session without memory."""
        return Session(
            program,
            world,
            self.modules(),
            None,
            self.settings,
            self.dtype,
            self.kernels,
            self.bucket_elements,
            groups,
        )
