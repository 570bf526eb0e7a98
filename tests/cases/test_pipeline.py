"""Splits, groups and messages of pipelines: no layer is lost, no rank hangs, nothing arrives altered."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.errors import StrategyError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline import Action, spell_steps
from hetero_megatron.pipeline.plan import plan_schedule
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.boundary import Boundary
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Strategy
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.distributed.training import (
    ADAM,
    LOSS_RTOL,
    T0,
    Document,
    assert_parity,
    build,
    het4,
    micro_batch,
    reference,
    sequences,
    stage,
    start,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)
STEPS = [D0[0:6], D0[6:12], D0[12:18]]


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


def one_rank_stages(*layers: str) -> list[Any]:
    return [stage(str(rank), numbers) for rank, numbers in enumerate(layers)]


# Layers lost when they do not divide by the stages (O-01).


def test_seven_layers_on_three_stages_are_all_trained() -> None:
    seven = replace(T0, num_layers=7)
    plan = strategy((3, 2, one_rank_stages("0-2", "3-4", "5-6")))
    assert [layer for each in plan.pipelines[0].stages for layer in each.layer_numbers] == list(range(7))
    found = train(plan, STEPS, seven)
    assert sum(tensors["parameter"].numel() for tensors in found.tensors.values()) == 71_136
    assert_parity(found, reference(STEPS, seven))


# A stage without layers (O-04).

EDGES = {
    "embedding alone and head alone": one_rank_stages("", "0-3", ""),
    "embedding alone": one_rank_stages("", "0-1", "2-3"),
    "head alone": one_rank_stages("0-1", "2-3", ""),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_first_or_last_stage_may_hold_no_layer(name: str) -> None:
    plan = strategy((3, 2, EDGES[name]))
    assert None in [each.layers for each in plan.pipelines[0].stages]
    assert_parity(train(plan, STEPS), reference(STEPS))


def test_an_edge_stage_without_layers_may_have_another_degree() -> None:
    plan = strategy((3, 2, [stage("0-1", None), stage("2", "0-3"), stage("3-4", None)]))
    assert_parity(train(plan, STEPS), reference(STEPS))


def test_an_empty_stage_between_others_is_refused_before_any_process() -> None:
    plan = strategy((3, 2, one_rank_stages("0-1", "", "2-3")))
    with pytest.raises(StrategyError, match="pipeline 0 stage 1 is an empty stage between others"):
        build(Llama(T0), plan)


# Local layer numbers leak into exported names (O-05).


def test_the_weights_of_a_layer_carry_its_global_number() -> None:
    model = Llama(T0)
    program = build(model, strategy((1, 1, [stage("0", "0"), stage("1-2", "1-2"), stage("3", "3")])))

    def work(world: World) -> dict[str, Tensor]:
        session = start(model, program, world, ADAM, torch.float32, 7)
        with torch.no_grad():
            for number, layer in enumerate(model.layers):
                for norm in (layer.attention_norm, layer.mlp_norm):
                    norm.weight.fill_(number + 1)  # on the meta device where the layer is another rank's
        return {name: kinds["parameter"] for name, kinds in session.shards().items() if "_norm." in name}

    found = run_ranks(range(4), work, 30)
    norms = ("attention_norm", "mlp_norm")
    named = {f"layers.{layer}.{norm}.weight": layer + 1.0 for layer in range(4) for norm in norms}
    seen: dict[str, list[int]] = {}
    for rank, weights in found.items():
        for name, weight in weights.items():
            seen.setdefault(name, []).append(rank)
            if name != "final_norm.weight":
                assert weight.tolist() == [named[name]] * 32, f"{name} on rank {rank}"
    assert seen.keys() == {*named, "final_norm.weight"}
    assert {name: ranks for name, ranks in seen.items() if "attention" in name} == {
        "layers.0.attention_norm.weight": [0],
        "layers.1.attention_norm.weight": [1, 2],
        "layers.2.attention_norm.weight": [1, 2],
        "layers.3.attention_norm.weight": [3],
    }


# Subgroups created by members only, or in another order (O-07).

HET4_GROUPS = (
    (0, 1),  # the TP group of stage 0: activations, and norm weights under sequence parallelism
    (0, 1, 2),  # pipeline 0, to compare micro-batches
    (0, 3),  # halves of layers 0-2 and of the embedding: rank 0 and its counterpart in the whole tensor
    (1, 3),  # the other halves
    (2, 3),  # layer 3 and the head
)
TIED_GROUPS = (
    (0, 1),
    (0, 1, 2),
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


# Fewer micro-batches than stages (O-32).


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("layers", [("0-1", "2", "3"), ("0", "1", "2", "3")], ids=["3 stages", "4 stages"])
def test_a_pipeline_may_have_fewer_micro_batches_than_stages(
    layers: Sequence[str], micro_batches: int
) -> None:
    plan = strategy((micro_batches, 6, one_rank_stages(*layers)))
    assert_parity(train(plan, STEPS, timeout_s=30), reference(STEPS))


def test_two_pipelines_of_other_depth_may_have_one_micro_batch_each() -> None:
    second = [stage("2", "0-1"), stage("3", "2"), stage("4", "3")]
    plan = strategy((1, 3, one_rank_stages("0-2", "3")), (1, 3, second))
    assert_parity(train(plan, STEPS, timeout_s=30), reference(STEPS))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 9])
def test_a_stage_warms_up_with_as_many_forwards_as_there_are_stages_after_it(
    stages: int, micro_batches: int
) -> None:
    (actions,) = plan_schedule("1f1b", [(stages, micro_batches, 1)]).pipelines
    for number, tasks in enumerate(actions.compute):
        warm_up = min(micro_batches, stages - 1 - number)
        ahead = tasks.index(Action("B", 0))
        assert ahead == min(micro_batches, warm_up + 1), f"stage {number}: {spell_steps(tasks)}"


def test_one_micro_batch_is_one_forward_and_one_backward_on_every_stage() -> None:
    schedule = plan_schedule("1f1b", [(3, 1, 1)])
    assert [spell_steps(tasks) for tasks in schedule.pipelines[0].compute] == ["F0 B0"] * 3
    assert [line.split("|")[1].split() for line in str(schedule).splitlines()[1:]] == [
        ["F0", ".", ".", ".", ".", ".", ".", "B0", "=="],
        [".", "F0", ".", ".", ".", "B0", "==", ".", "."],
        [".", ".", "F0", "B0", "==", ".", ".", ".", "."],
    ]


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


# Ranks disagree on the number of micro-batches (O-36).

MIXED = (16, 9, 16, 4, 7)


def test_pipelines_may_have_other_counts_of_micro_batches_of_mixed_lengths() -> None:
    steps = [
        tuple(document[:length] for document, length in zip(D0[first : first + 5], MIXED, strict=True))
        for first in (0, 5, 10)
    ]
    # SGD: of so few tokens, some gradients are all rounding, which Adam would blow up a hundredfold.
    found = train(het4((3, 1), (2, 1)), steps, settings=SGD, timeout_s=30)
    assert_parity(found, reference(steps, settings=SGD))


def test_a_stage_that_believes_in_another_count_is_told_before_the_first_send(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def believe(session: Session, _: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        return batches[:2] if session.world.rank == 2 else batches

    def shout(session: Session) -> None:
        communicate = session.stage.communicate

        def shouted(*arguments: Any) -> None:
            print("something is sent", flush=True)
            communicate(*arguments)

        session.stage.communicate = shouted  # type: ignore[method-assign]

    began = time.monotonic()
    with pytest.raises(RanksFailed):
        train(het4((3, 1), (2, 1)), [D0[:5]], batches_of=believe, prepare=shout, timeout_s=30)
    assert time.monotonic() - began < 15
    out, err = capfd.readouterr()
    assert "something is sent" not in out
    told = (
        "error: pipeline 0 disagrees on micro-batches: stage 0 (rank 0) has 3, "
        "stage 1 (rank 2) has 2; nothing was sent\n"
    )
    assert err.count(told) == 3, "every rank of the pipeline says so"


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
