"""The messages of pipelines, watched where they arrive."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetero_megatron.runtime.boundary import Boundary
from hetero_megatron.runtime.session import Session


class Arrival(NamedTuple):
    """A message as it stands on the receiver."""

    boundary: str
    micro_batch: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def boundaries(session: Session, direction: str) -> list[Boundary]:
    """The boundaries of this rank's stage over which it can 'send' or 'receive'."""
    ports = [port for chunk in (*session.stage._inputs, *session.stage._outputs) for port in chunk]
    found = [each for port in ports for each in (port.forward, port.backward) if each is not None]
    ends = {"send": "src", "receive": "dst"}[direction]
    return [each for each in found if getattr(each.plan, ends).subgroup_of(session.world.rank) is not None]


def log_arrivals(session: Session, log: list[Arrival]) -> None:
    """Note every message that this rank receives, in `log`."""
    reshards = len(session.program.reshards)

    def watch(boundary: Boundary) -> None:
        receive = boundary.receive

        def watched(shape: tuple[int, ...], tag: int, dtype: torch.dtype) -> Any:
            operations, finish = receive(shape, tag, dtype)

            def noted() -> Tensor:
                shard = finish()
                log.append(Arrival(boundary.name, tag // 2 // reshards, tuple(shard.shape), shard.dtype))
                return shard

            return operations, noted

        boundary.receive = watched  # type: ignore[method-assign]

    for boundary in boundaries(session, "receive"):
        watch(boundary)
