"""A change of strategy between two steps: the state of one Session goes over to another (paper §7).

Weights, moments and counters are the same bits afterwards; only where they lie is another. Both Sessions are made
before: a switch costs what it transfers.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero_megatron.runtime.move import Moves
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """What a switch moved, equal on every rank but for `sent`.

    Attributes:
        moved_bytes: of all ranks together.
        slowest_sender: rank and bytes of the one whose links are busy for the longest time; None when nothing moves.
        seconds: by phase (pack, move, unpack, gather, and in all), of the slowest rank in each.
        sent: what this rank sent, in bytes by receiver.
    """

    moved_bytes: int
    slowest_sender: tuple[int, int] | None
    seconds: Mapping[str, float]
    sent: Mapping[int, int]

    def __str__(self) -> str:
        """The line for the log."""
        phases = ", ".join(f"{phase} {took:.3f}" for phase, took in self.seconds.items() if phase != "total")
        slowest = ""
        if self.slowest_sender:
            rank, sent = self.slowest_sender
            slowest = f", rank {rank} the slowest sender with {sent / 1e6:,.2f} MB"
        return f"{self.moved_bytes / 1e6:,.2f} MB moved{slowest}, in {self.seconds['total']:.3f} s ({phases})"


def switch(
    moves: Moves, world: World, before: Session | None, after: Session | None, keep: bool = False
) -> SwitchReport:
    """Collective over all processes of `world`: move the state of `before` into `after`, a session without memory.

    A rank that had no part before, or has none after, passes None. `before` has no memory afterwards, unless `keep`
    lets it have its master weights and moments until the caller releases them.
    """
    began = time.perf_counter()
    if before:
        before.gather.finish()
    counters = _counters(moves, world, before)
    moved = moves.run(keep)
    at = time.perf_counter()
    if after:
        after.iteration, after.skipped_iterations, after.state.step = counters
        if before:
            after.gradient_hook = before.gradient_hook
        after.gather.start()
    now = time.perf_counter()
    seconds = moved.seconds | {"gather": now - at, "total": now - began}
    slowest, total = _slowest(moves)
    return SwitchReport(total, slowest, _longest(world, seconds), moved.sent)


def change_layout(world: World, before: Session, after: Session) -> SwitchReport:
    """Go on with another program of the same optimizer states: no state moves, parameters are gathered anew.

    Collective over all processes of `world`. What is moved are the parameters, in their dtype.
    """
    began = time.perf_counter()
    before.gather.finish()
    before.state.release(*before.state.own)
    after.state.take(*after.state.own)
    after.iteration, after.skipped_iterations = before.iteration, before.skipped_iterations
    after.state.step = before.state.step
    after.gradient_hook = before.gradient_hook
    at = time.perf_counter()
    after.gather.start()
    now = time.perf_counter()
    sent = after.gather_bytes
    slowest = max(sent, key=lambda rank: sent[rank], default=None)
    return SwitchReport(
        sum(sent.values()),
        None if slowest is None else (slowest, sent[slowest]),
        _longest(world, {"gather": now - at, "total": now - began}),
        {},
    )


def _counters(moves: Moves, world: World, before: Session | None) -> tuple[int, int, int]:
    """Iteration, skipped iterations and optimizer steps, from the first living rank that has them."""
    numbers = torch.zeros(3, dtype=torch.int64)
    if before:
        numbers = torch.tensor([before.iteration, before.skipped_iterations, before.state.step])
    if len(world.ranks) > 1:
        first = world.ranks.index(moves.plan.owners[0])
        dist.broadcast(numbers, group=world.control, group_src=first)
    iteration, skipped, step = numbers.tolist()
    return iteration, skipped, step


def _longest(world: World, seconds: Mapping[str, float]) -> dict[str, float]:
    """Of all ranks, by phase; when it returns, every rank has its new state."""
    numbers = torch.tensor(list(seconds.values()), dtype=torch.float64)
    if len(world.ranks) > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=world.control)
    return dict(zip(seconds, numbers.tolist(), strict=True))


def _slowest(moves: Moves) -> tuple[tuple[int, int] | None, int]:
    """(rank, bytes) of the sender with the most seconds of sending, by the cluster's links; bytes of all ranks."""
    cluster = moves.plan.cluster
    links = {link.name: link for link in (*(kind.link for kind in cluster.kinds), cluster.inter_node)}
    sent = moves.bytes_sent
    if not sent:
        return None, 0
    times = {rank: sum(n / links[name].gb_per_s for name, n in by.items()) for rank, by in sent.items()}
    rank = max(times, key=lambda each: times[each])
    totals = {each: int(sum(by.values())) for each, by in sent.items()}
    return (rank, totals[rank]), sum(totals.values())
