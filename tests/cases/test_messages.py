"""What stages send each other arrives whole, in its own size and type, and in both directions at once."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.pipeline import Action
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.cases.arrivals import Arrival, boundaries, log_arrivals
from tests.cases.stages import one_rank_stages
from tests.distributed.ranks import RanksFailed
from tests.distributed.training import (
    Document,
    assert_parity,
    micro_batch,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)


# Receive buffers sized from the first micro-batch (O-33).


@pytest.mark.parametrize(
    ("rows", "limit", "sizes"), [(8, (3, 3), (3, 3, 2)), (5, (3, 2), (2, 2, 1)), (1, (1, 3), (1,))], ids=str
)
def test_a_smaller_last_micro_batch_keeps_its_size_on_every_stage(
    rows: int, limit: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    plan = strategy((*limit, one_rank_stages("0-1", "2", "3")))
    steps = [D0[at : at + rows] for at in (0, 8, 16)]
    log: list[Arrival] = []
    found = train(
        plan, steps, prepare=lambda session: log_arrivals(session, log), collect=lambda _: log, timeout_s=30
    )
    assert_parity(found, reference(steps))
    whole = [(number, (16 * size, 32)) for number, size in enumerate(sizes)]
    for rank, arrivals in found.extra.items():
        for gradient, wanted in ((False, whole * 3 * (rank > 0)), (True, whole * 3 * (rank < 2))):
            shapes = [(a.micro_batch, a.shape) for a in arrivals if ("gradient" in a.boundary) == gradient]
            assert shapes == wanted, f"rank {rank}, {'gradients' if gradient else 'activations'}"


# Shapes that travel to the wrong peer, or a shorter message taken for a whole one (O-34).

UNEVEN = ((9, 7), (7,), (5, 4, 3), (1,))
LANES = {
    "TP2 > TP2 > TP1": [stage("0-1", "0-1"), stage("2-3", "2"), stage("4", "3")],
    "TP2 > TP2": [stage("0-1", "0-1"), stage("2-3", "2-3")],
    "TP2 > TP1": [stage("0-1", "0-2"), stage("2", "3")],
}


def cut(lengths: Sequence[Sequence[int]], first: int) -> list[list[Document]]:
    """Micro-batches of documents of these lengths, from document `first` of D0 on."""
    documents = iter(D0[first:])
    return [[next(documents)[:length] for length in each] for each in lengths]


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", LANES)
def test_micro_batches_of_other_lengths_arrive_whole_on_every_lane(
    name: str, sequence_parallel: bool
) -> None:
    plan = strategy((4, 2, LANES[name]), sequence_parallel=sequence_parallel)
    packed = [cut(UNEVEN, first) for first in (0, 7, 14)]
    steps = [tuple(document for documents in each for document in documents) for each in packed]
    multiple = 2 if sequence_parallel else 1
    log: list[Arrival] = []

    def batches_of(_: Session, step: int, __: list[MicroBatch]) -> list[MicroBatch]:
        return [micro_batch(documents, multiple) for documents in packed[step]]

    found = train(
        plan,
        steps,
        batches_of=batches_of,
        prepare=lambda session: log_arrivals(session, log),
        collect=lambda _: log,
        timeout_s=30,
    )
    assert_parity(found, reference(steps))
    tokens = [16, 8, 12, 2] if sequence_parallel else [16, 7, 12, 1]
    for number, each in enumerate(plan.pipelines[0].stages):
        parts = each.tensor_parallel_size if sequence_parallel else 1
        wanted = [(number, (count // parts, 32)) for number, count in enumerate(tokens)] * 3
        last = number == len(plan.pipelines[0].stages) - 1
        for rank in each.ranks:
            for gradient, there in ((False, number > 0), (True, not last)):
                shapes = [
                    (a.micro_batch, a.shape)
                    for a in found.extra[rank]
                    if ("gradient" in a.boundary) == gradient
                ]
                assert shapes == (wanted if there else []), f"rank {rank}, gradients: {gradient}"


@pytest.mark.parametrize(
    ("sender", "receiver", "boundary", "elements"),
    [(0, 2, "layers.2.entry", 256), (3, 4, "layers.3.entry", 256), (4, 2, "layers.3.entry (gradient)", 256)],
)
def test_a_message_cut_by_one_element_ends_the_run_and_names_ranks_and_sizes(
    sender: int, receiver: int, boundary: str, elements: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def shorten(session: Session) -> None:
        for each in boundaries(session, "send"):
            if session.world.rank == sender and each.name == boundary:
                each.send = shortened(each.send, len(session.program.reshards))  # type: ignore[method-assign]

    def shortened(send: Callable[..., list[dist.P2POp]], reshards: int) -> Callable[..., list[dist.P2POp]]:
        def second_one_short(shard: Tensor, shape: tuple[int, ...], tag: int) -> list[dist.P2POp]:
            operations = send(shard, shape, tag)
            if tag // 2 // reshards == 1:
                first = operations[0]
                operations[0] = dist.P2POp(first.op, first.tensor[:-1], first.peer, tag=first.tag)
            return operations

        return second_one_short

    began = time.monotonic()
    with pytest.raises(RanksFailed):
        train(strategy((4, 1, LANES["TP2 > TP2 > TP1"])), [D0[:4]], prepare=shorten, timeout_s=30)
    assert time.monotonic() - began < 15
    assert (
        f"error: {boundary}: rank {receiver} expected {elements} elements from rank {sender}, "
        f"which sent {elements - 1}; the two sides disagree on the size\n"
    ) in capfd.readouterr().err


# Send and receive order between neighbours (O-35).

# 512 tokens of 1024 floats are 2 MiB: no transport takes them in before the receiver asks for them.
# The layers are otherwise narrow, so that messages are what takes time.
WIDE = LlamaConfig(
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_query_groups=4,
    vocab_size=32,
    head_dim=2,
)
NEIGHBOURS = {
    "TP2 > TP1": [stage("0-1", "0"), stage("2", "1")],
    "TP1 > TP2": [stage("0", "0"), stage("1-2", "1")],
    "TP4 > TP2": [stage("0-3", "0"), stage("4-5", "1")],
}


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("TP2 > TP1", False), ("TP1 > TP2", False), ("TP4 > TP2", True)]
)
def test_large_messages_pass_in_both_directions_whoever_is_late(name: str, sequence_parallel: bool) -> None:
    plan = strategy((6, 1, NEIGHBOURS[name]), sequence_parallel=sequence_parallel)
    documents = sequences(6, length=512, vocab=32)
    delays = random.Random()

    def late(session: Session) -> None:
        compute = session.stage.compute

        def delayed(action: Action, batches: Sequence[MicroBatch]) -> Tensor | None:
            if session.iteration:
                time.sleep(delays.uniform(0.0, 0.02))
            return compute(action, batches)

        session.stage.compute = delayed  # type: ignore[method-assign]

    # No delay in the first step, then five seeds; the learning rate 0 makes all steps alike.
    found = train(
        plan,
        [documents] * 6,
        WIDE,
        replace(SGD, lr=0.0),
        prepare=late,
        before_step=lambda session, step: delays.seed(f"{step} {session.world.rank}"),
        timeout_s=60,
    )
    assert len(set(found.losses)) == 1, f"a delay changes the loss: {found.losses}"
    assert len(set(found.norms)) == 1, f"a delay changes the gradient: {found.norms}"


# Buffers reused for another number type (O-37).


def test_types_arrive_as_they_were_sent_on_all_of_three_stages() -> None:
    plan: Strategy = strategy((4, 1, one_rank_stages("0-1", "2", "3")))
    steps = [D0[at : at + 4] for at in (0, 4, 8)]
    log: list[Arrival] = []
    integers: list[tuple[list[int], tuple[int, ...]]] = []

    def note(session: Session, step: int) -> None:
        assert session.state.compute.dtype is torch.bfloat16
        assert session.state.gradient.dtype is session.state.master.dtype is torch.float32

    def sides(session: Session, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        for batch in batches:
            assert batch.segments.positions_T.dtype is torch.int64
            integers.append((batch.segments.positions_T.tolist(), batch.segments.cu_seqlens))
        return batches

    found = train(
        plan,
        steps,
        dtype=torch.bfloat16,
        batches_of=sides,
        before_step=note,
        prepare=lambda session: log_arrivals(session, log),
        collect=lambda _: (log, integers),
        timeout_s=30,
    )
    assert [len(arrivals) for arrivals, _ in found.extra.values()] == [12, 24, 12]
    for rank, (arrivals, seen) in found.extra.items():
        assert {arrival.dtype for arrival in arrivals} == {torch.bfloat16}, f"rank {rank}"
        assert seen == [(list(range(16)), (0, 16))] * 12, f"rank {rank}"
    wanted = reference(steps)
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2)
    assert found.norms == pytest.approx(wanted.norms, rel=2e-2)
    # Stages add no rounding of their own: one rank rounds in the same places.
    alone = train(strategy((4, 1, [stage("0", "0-3")])), steps, dtype=torch.bfloat16)
    assert found.losses == alone.losses
    for name, tensors in alone.tensors.items():
        for kind, tensor in tensors.items():
            assert torch.equal(found.tensors[name][kind], tensor), f"{kind} of {name}"
