"""ZeRO-1 over sizes that do not split evenly, pieces that are empty included (O-30)."""

import dataclasses
from itertools import chain

import pytest
import torch
from torch import Tensor

from hetero_megatron.annotation import Annotation
from hetero_megatron.comm import resolve
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.state import Placement, State, lay_out, view
from hetero_megatron.runtime.sync import GradientSync, ParameterGather
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.strategy import Strategy
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    alter_gradients,
    assert_parity,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
ZERO_STAGES = (0,)  # these say it themselves


def replicas(count: int) -> Strategy:
    """Each takes the same rows' worth of work: `count` rows a step, one on each."""
    return strategy(*((1, 1, [stage(str(rank), "0-3")]) for rank in range(count)), zero=1)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_pieces_hold_every_element_once_and_train_like_whole_states(count: int) -> None:
    steps = [sequences(count, seed=step) for step in range(3)]
    cut = train(replicas(count), steps)
    held = [
        shard[kind].numel()
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for shard in chain.from_iterable(shards.values() for shards in cut.shards.values())
    ]
    assert sum(held) == 3 * 43_296
    whole = train(dataclasses.replace(replicas(count), zero=0), steps)
    assert_parity(cut, whole)
    for name, tensors in whole.tensors.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(cut.tensors[name][moment], tensors[moment], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_pieces_train_the_model_of_one_device(count: int) -> None:
    steps = [sequences(count, seed=step) for step in range(3)]
    assert_parity(train(replicas(count), steps, settings=SGD), reference(steps, settings=SGD))


def test_padding_is_not_in_the_norm() -> None:
    def ones(session: object) -> None:
        alter_gradients(session, lambda slot, gradient, divisor: gradient.fill_(divisor))  # type: ignore[arg-type]

    found = train(replicas(5), [sequences(5)], prepare=ones)
    assert found.norms[0] == pytest.approx(208.0769, abs=1e-4)


@pytest.mark.parametrize(
    ("elements", "ranks", "pieces"), [(57, 2, [29, 28]), (1, 3, [1, 0, 0]), (4, 3, [2, 1, 1])]
)
def test_a_vector_of_any_size_is_updated_piece_by_piece(elements: int, ranks: int, pieces: list[int]) -> None:
    """Ones on every rank come back as their sum, and every rank ends with the whole updated vector."""
    alone = tuple(Annotation.on((rank,)) for rank in range(ranks))
    groups, states = tuple(a.groups[0] for a in alone), tuple(a.states[0] for a in alone)
    copies, partial, rows = (Annotation(groups, states, hdim) for hdim in (-1, -2, 0))
    post, pre = resolve(partial, rows), resolve(rows, copies)

    def work(world: World) -> tuple[int, Tensor]:
        members = Groups(world, (tuple(range(ranks)),), ())
        placement = Placement("vector.weight", (elements,), copies, rows, post, pre)
        state = State(lay_out(world.rank, [placement]), torch.float32, world.device)
        state.initialise(lambda slot: torch.arange(elements, dtype=torch.float32)[slice(*slot.bounds[0])])
        state.accumulated.fill_(1.0)
        sync = GradientSync(state, world, members, {})
        sync.begin()
        sync.finish()
        for slot in state.slots:
            view(state.master, slot).add_(view(state.gradient, slot))
        ParameterGather(state, world, members, {}).start()
        return state.master.numel(), state.compute.clone()

    found = run_ranks(range(ranks), work)
    assert [held for held, _ in found.values()] == pieces
    for _, whole in found.values():
        assert whole.tolist() == [float(number + ranks) for number in range(elements)]
