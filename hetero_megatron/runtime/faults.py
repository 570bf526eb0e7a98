"""Faults on purpose: a rank that is killed, stopped or slow, or loses its connections, at a phase of a step.

For tests and demonstrations; a run without `faults` pays nothing.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.board import PHASES
from hetero_megatron.runtime.sockets import Sockets, cut

KINDS = ("kill", "stop", "delay", "drop", "slow")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank when it comes to `phase` of step `iteration` for the `occurrence`-th time (from 1).

    `kill` is SIGKILL, `stop` SIGSTOP, `delay` a pause of `seconds`, `drop` cuts all of its connections to others.
    `slow` makes every forward and backward pass take `factor` times as long from then on; the rank rests meanwhile, so that
    others on the same processor are not slowed down.
    """

    kind: str
    rank: int
    iteration: int
    phase: str
    occurrence: int = 1
    seconds: float = 1.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RuntimeFailure(f"fault {self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.phase not in PHASES:
            raise RuntimeFailure(f"a fault in {self.phase!r}: a step has the phases {', '.join(PHASES)}")


@dataclass
class Faults:
    """The faults of a run, each of which strikes once.

    Attributes:
        slowness: how many times as long as it should this process takes for a pass.
    """

    planned: Sequence[Fault]
    slowness: float = 1.0
    _seen: dict[Fault, int] = field(default_factory=dict)

    def strike(self, rank: int, phase: str, iteration: int, sockets: Sockets = frozenset()) -> None:
        """`rank` has come to a phase; `sockets` are its connections to other ranks."""
        for fault in self.planned:
            if (fault.rank, fault.phase, fault.iteration) == (rank, phase, iteration):
                self._seen[fault] = self._seen.get(fault, 0) + 1
                if self._seen[fault] == fault.occurrence and fault.kind == "slow":
                    self.slowness = fault.factor
                elif self._seen[fault] == fault.occurrence:
                    _do(fault, sockets)


def _do(fault: Fault, sockets: Sockets) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "delay":
        time.sleep(fault.seconds)
    else:
        cut(sockets)
