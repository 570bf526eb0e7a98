"""Two ranks, each with the whole tiny model, that save while they train."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import ADAM, T0, build, micro_batch, sequences, stage, start, strategy

DP2 = strategy((1, 1, [stage("0", "0-3")]), (1, 1, [stage("1", "0-3")]))


class Run:
    """A session of one rank and its saver; steps and their losses are counted by iteration."""

    def __init__(self, world: World, session: Session, make_saver: Callable[[Session], Saver]) -> None:
        self.world, self.session, self.saver = world, session, make_saver(session)
        self.losses: dict[int, float] = {}

    def step(self) -> Saved | Failed | None:
        """One step on data that its iteration alone decides; how a save ended in it, if one did."""
        documents = sequences(2, seed=self.session.iteration)
        batches = [micro_batch([documents[self.world.index(self.world.rank) % 2]])]
        result = self.session.step(batches, votes=self.saver.votes())
        self.losses[result.iteration] = result.loss
        return self.saver.settle(result.votes)

    def save(self) -> Saved | Failed | None:
        """Begin to save, or save."""
        return self.saver.start(self.session.iteration, {"sample": 2 * self.session.iteration})


def run(
    work: Callable[[Run], Any],
    make_saver: Callable[[Session], Saver],
    saved: SavedState | None = None,
    ranks: Sequence[int] = (0, 1),
) -> dict[int, Any]:
    """`work(run)` on every rank."""
    model = Llama(T0)
    plan = DP2 if len(ranks) == 2 else strategy((1, 1, [stage("0", "0-3")]))
    program = build(model, plan)

    def on_rank(world: World) -> Any:
        session = start(model, program, world, ADAM, torch.float32, 7, saved=saved)
        return work(Run(world, session, make_saver))

    return run_ranks(ranks, on_rank)
