"""Messages between stages: which slice goes to whom, and what a message of the wrong size does."""

import faulthandler
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import CommPlan, interpret, resolve, shard
from hetero_megatron.comm.steps import Stage, Transfer
from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.boundary import _CANARY_BITS, Boundary, _mark, _unwritten
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import RanksFailed, run_ranks

TYPES = [torch.float32, torch.bfloat16]


def union(*subgroups: tuple[tuple[int, ...], dict[int, int]]) -> Annotation:
    groups, states = zip(*subgroups, strict=True)
    return Annotation(tuple(map(DeviceGroup, groups)), tuple(map(DistributedStates.of, states)), 0)


ROWS, WHOLE = {0: 2}, {-1: 2}
PLANS = {
    "TP2 > TP1, tokens split": resolve(Annotation.on((0, 1), ROWS), Annotation.on((2,))),
    "TP2 > TP1, copies": resolve(Annotation.on((0, 1), WHOLE), Annotation.on((2,))),
    "TP1 > TP2, tokens split": resolve(Annotation.on((0,)), Annotation.on((1, 2), ROWS)),
    "TP1 > TP2, copies": resolve(Annotation.on((0,)), Annotation.on((1, 2), WHOLE)),
    "TP2 > TP2": resolve(Annotation.on((0, 1), ROWS), Annotation.on((2, 3), ROWS)),
    "TP4 > TP2": resolve(Annotation.on((0, 1, 2, 3), {0: 4}), Annotation.on((4, 5), ROWS)),
    "TP2 > TP4": resolve(Annotation.on((0, 1), ROWS), Annotation.on((2, 3, 4, 5), {0: 4})),
    "columns > rows": resolve(Annotation.on((0, 1), {1: 2}), Annotation.on((2, 3), ROWS)),
    "one of two pipelines": resolve(union(((0, 1), ROWS), ((3,), {})), union(((2,), {}), ((3,), {}))),
}


def test_every_rank_receives_its_shard_whatever_the_degrees_on_both_sides() -> None:
    full = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)

    def work(world: World) -> Any:
        found: dict[str, np.ndarray] = {}
        for name, plan in PLANS.items():
            steps = [step for stage in plan.stages for step in stage.steps]
            if world.rank not in {rank for step in steps for rank in step.ranks if len(step.ranks) > 1}:
                continue
            boundary = Boundary(name, plan, world)
            if plan.src.subgroup_of(world.rank) is not None:
                mine = torch.from_numpy(shard(plan.src, full)[world.rank]).float()
                for handle in dist.batch_isend_irecv(boundary.send(mine, full.shape, 3)):
                    handle.wait()
            else:
                operations, finish = boundary.receive(full.shape, 3, torch.float32)
                for handle in dist.batch_isend_irecv(operations):
                    handle.wait()
                found[name] = finish().numpy()
        return found

    results = run_ranks(range(6), work, 30)
    for name, plan in PLANS.items():
        wanted = interpret(plan, shard(plan.src, full), full.shape)
        for rank in set(plan.dst.ranks) - set(plan.src.ranks):
            np.testing.assert_array_equal(results[rank][name], wanted[rank], f"{name}, rank {rank}")


def world(rank: int, ranks: int) -> World:
    """A World without processes, enough to compile messages."""
    return World(rank, tuple(range(ranks)), torch.device("cpu"), None, None)  # type: ignore[arg-type]


def test_a_pair_of_ranks_exchanges_one_message_per_micro_batch() -> None:
    for name, plan in PLANS.items():
        crossing = set(plan.src.ranks) ^ set(plan.dst.ranks)
        sides = {rank: Boundary(name, plan, world(rank, 6))._side((8, 6)) for rank in crossing}
        for rank, side in sides.items():
            assert len({message.peer for message in side.sends}) == len(side.sends), f"{name}: rank {rank}"
            for message in side.sends:
                (back,) = [other for other in sides[message.peer].receives if other.peer == rank]
                assert back.elements == message.elements, f"{name}: rank {rank} to {message.peer}"


class Posted(NamedTuple):
    """A P2POp that needs no process group."""

    op: Any
    tensor: torch.Tensor
    peer: int
    tag: int


def test_a_contiguous_message_is_sent_from_where_it_lies_and_used_where_it_lands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "P2POp", Posted)
    plan, shape = PLANS["TP2 > TP2"], (8, 6)
    tensor = torch.zeros(4, 6)
    (send,) = Boundary("entry", plan, world(0, 4)).send(tensor, shape, 5)
    assert (send.op, send.peer, send.tag) == (dist.isend, 2, 5)
    assert send.tensor.data_ptr() == tensor.data_ptr()
    (receive,), finish = Boundary("entry", plan, world(2, 4)).receive(shape, 5, torch.float32)
    assert (receive.op, receive.peer, receive.tag) == (dist.irecv, 0, 5)
    receive.tensor.fill_(1.0)
    assert finish().data_ptr() == receive.tensor.data_ptr()


def test_slices_of_one_message_land_where_they_belong_in_whatever_order_they_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "P2POp", Posted)
    before, after, whole = Annotation.on((0,)), Annotation.on((1,)), Annotation.on((1,)).region(1)
    steps = (Transfer(0, 1, whole.cut(0, 1, 2)), Transfer(0, 1, whole.cut(0, 0, 2)))
    plan = CommPlan(before, after, (Stage(after, steps),), ("BSR",))
    tensor = torch.arange(48.0).view(8, 6)
    (send,) = Boundary("entry", plan, world(0, 2)).send(tensor, (8, 6), 0)
    assert send.tensor[0] == 24.0, "the lower half goes first"
    (receive,), finish = Boundary("entry", plan, world(1, 2)).receive((8, 6), 0, torch.float32)
    receive.tensor.copy_(send.tensor)
    assert torch.equal(finish(), tensor)


def test_a_boundary_that_would_reduce_is_refused() -> None:
    plan: CommPlan = resolve(Annotation.on((0, 1), {-2: 2}), Annotation.on((2,)))
    with pytest.raises(RuntimeFailure) as refused:
        Boundary("layers.3.entry", plan, world(0, 3))
    assert str(refused.value) == (
        f"layers.3.entry: {plan.label} between two stages; a stage boundary can only send and receive, "
        "reduce inside the stage first"
    )


# A short message: gloo fills in what there is and says nothing.


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("elements", "missing"), [(1, 1), (7, 0), (7, 1), (7, 7), (3000, 1), (3000, 1024), (3000, 0)]
)
def test_what_was_not_written_is_counted(dtype: torch.dtype, elements: int, missing: int) -> None:
    buffer = torch.empty(elements, dtype=dtype)
    _mark(buffer)
    buffer[: elements - missing] = float("nan") if elements == 7 else 0.5
    assert _unwritten(buffer) == missing


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_mark_is_a_number_that_no_arithmetic_makes(dtype: torch.dtype) -> None:
    buffer = torch.empty(1, dtype=dtype)
    _mark(buffer)
    assert buffer.isnan().all()
    for result in (
        buffer + 0.0,
        buffer * 1.0,
        torch.tensor([float("nan")], dtype=dtype),
        buffer.exp(),
        0 * buffer,
    ):
        assert _unwritten(result) == 0, "a signalling NaN becomes a quiet one in every operation"
    assert struct.pack("<I", _CANARY_BITS[4])[2] < 0xC0


def test_an_empty_buffer_and_other_types_carry_no_mark() -> None:
    for buffer in (torch.empty(0), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)):
        _mark(buffer)
        assert _unwritten(buffer) == 0


@pytest.mark.parametrize(
    ("tokens", "cut", "sent"),
    [(8, 1, "47"), (8, 48, "0"), (512, 1024, "at most 2048"), (512, 2000, "at most 2048")],
)
def test_a_message_that_is_too_short_names_ranks_and_both_sizes(
    tokens: int, cut: int, sent: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = resolve(Annotation.on((0,)), Annotation.on((4,)))

    def work(world: World) -> Any:
        boundary = Boundary("layers.3.entry", plan, world)
        shape = (tokens, 6)
        if world.rank == 0:
            message = torch.ones(6 * tokens - cut)
            for handle in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, 1, tag=2)]):
                handle.wait()
        else:
            operations, finish = boundary.receive(shape, 2, torch.float32)
            for handle in dist.batch_isend_irecv(operations):
                handle.wait()
            finish()

    with pytest.raises(RanksFailed):
        run_ranks((0, 4), work, 30)
    assert (
        f"error: layers.3.entry: rank 4 expected {6 * tokens} elements from rank 0, which sent {sent}; "
        "the two sides disagree on the size\n"
    ) in capfd.readouterr().err


def test_a_message_that_is_too_long_ends_the_receiver(capfd: pytest.CaptureFixture[str]) -> None:
    """Gloo ends the process itself, and tells both sizes in bytes."""

    def work(world: World) -> Any:
        faulthandler.disable()
        boundary = Boundary("entry", resolve(Annotation.on((0,)), Annotation.on((1,))), world)
        if world.rank == 0:
            operations = [dist.P2POp(dist.isend, torch.ones(13), 1, tag=2)]
        else:
            operations, _ = boundary.receive((2, 6), 2, torch.float32)
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()

    with pytest.raises(RanksFailed):
        run_ranks((0, 1), work, 30)
    assert "52 vs 48" in capfd.readouterr().err
