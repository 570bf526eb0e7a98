"""Process groups are the same on every rank, whoever starts late."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    ADAM,
    LOSS_RTOL,
    T0,
    build,
    het4,
    micro_batch,
    reference,
    sequences,
    start,
)

D0 = sequences(24)


# Subgroups created by members only, or in another order (O-07).

HET4_GROUPS = (
    (0, 1),  # the TP group of stage 0: activations, and norm weights under sequence parallelism
    (0, 1, 2),  # pipeline 0, to compare micro-batches
    (0, 1, 2, 3),  # all ranks of the strategy: torch's own group of all processes
    (0, 3),  # halves of layers 0-2 and of the embedding: rank 0 and its counterpart in the whole tensor
    (1, 3),  # the other halves
    (2, 3),  # layer 3 and the head
)
TIED_GROUPS = (
    (0, 1),
    (0, 1, 2),
    (0, 1, 2, 3),
    (0, 2, 3),  # halves of the shared weight, which is whole on ranks 2 and 3
    (0, 3),
    (1, 2, 3),  # the other halves
    (1, 3),
    (2, 3),
)


@pytest.mark.parametrize(
    ("config", "groups"),
    [(T0, HET4_GROUPS), (replace(T0, tie_word_embeddings=True), TIED_GROUPS)],
    ids=["untied", "tied"],
)
def test_ten_starts_with_random_delays_make_the_same_groups_and_the_same_loss(
    config: LlamaConfig, groups: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Llama(config)
    program = build(model, het4())
    join, attempt = World.join, 0

    def pause(rank: int, place: str) -> None:
        time.sleep(random.Random(f"{attempt} {rank} {place}").uniform(0.0, 0.3))

    def late(rendezvous: Any, *arguments: Any) -> World:
        pause(rendezvous.index, "join")
        return join(rendezvous, *arguments)

    def work(world: World) -> Any:
        pause(world.rank, "groups")
        session = start(model, program, world, ADAM, torch.float32, 7)
        rows = D0[3:4] if world.rank == 3 else D0[0:3]
        result = session.step([micro_batch([row], 2) for row in rows])
        return session.groups.created, result.loss, result.grad_norm

    monkeypatch.setattr(World, "join", staticmethod(late))
    seen = set()
    for attempt in range(10):  # noqa: B007  # `pause` reads it
        seen |= set(run_ranks(range(4), work, 30).values())
    assert len(seen) == 1, f"starts or ranks differ: {seen}"
    ((created, loss, _),) = seen
    assert created == groups
    assert loss == pytest.approx(reference([D0[:4]], config).losses[0], rel=LOSS_RTOL)
