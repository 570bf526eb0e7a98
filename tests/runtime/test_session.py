"""What a step leaves behind, what it refuses, and how long it keeps what it has sent."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero_megatron.errors import GraphError, RuntimeFailure
from hetero_megatron.layers import cross_entropy, embedding
from hetero_megatron.pipeline.action import Batch
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    ADAM,
    T0,
    Llama,
    build,
    het3,
    het4,
    micro_batch,
    sequences,
    stage,
    start,
    strategy,
    train,
)
from tests.runtime.live import Live

D0 = sequences(24)


def left_over(session: Session) -> dict[str, int]:
    """Activations, messages and sends that a session still holds, by kind."""
    stage_, held = session.stage, {}
    held["between F and B"] = sum(run.in_flight for run in stage_._runs)
    ports = [port for chunk in (*stage_._inputs, *stage_._outputs) for port in chunk]
    held["messages"] = sum(len(port.ready) + len(port.arriving) for port in ports)
    held["sends"] = len(stage_._sending)
    return held


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_leaves_no_activation_and_no_message_behind(schedule: str) -> None:
    plan = strategy(
        (3, 1, [stage("0-1", "0-2"), stage("2", "3")]), (2, 1, [stage("3", "0-3")]), schedule=schedule
    )
    found = train(plan, [D0[:5]] * 2, collect=left_over)
    for rank, held in found.extra.items():
        assert held == {"between F and B": 0, "messages": 0, "sends": 0}, f"rank {rank}"


def test_a_step_of_an_interleaved_pipeline_leaves_nothing_behind() -> None:
    plan = strategy((3, 1, [stage("0", "0, 2"), stage("1", "1, 3")]), schedule="interleaved")
    for held in train(plan, [D0[:3]] * 2, collect=left_over).extra.values():
        assert held == {"between F and B": 0, "messages": 0, "sends": 0}


@pytest.mark.parametrize(("schedule", "slow"), [("1f1b", 0), ("1f1b", 1), ("gpipe", 1)])
def test_sent_buffers_are_kept_for_a_pipeline_s_depth_not_for_a_step(schedule: str, slow: int) -> None:
    """With 12 micro-batches, 12 sends are the most on each side when nothing is given back."""
    most: list[int] = []

    def watch(session: Session) -> None:
        communicate = session.stage.communicate

        def watched(batch: Batch, batches: Sequence[MicroBatch]) -> None:
            if session.world.rank == slow:
                time.sleep(0.005)
            communicate(batch, batches)
            most.append(len(session.stage._sending))

        session.stage.communicate = watched  # type: ignore[method-assign]

    plan = strategy((12, 1, [stage("0", "0-1"), stage("1", "2-3")]), schedule=schedule)
    found = train(plan, [D0[:12]], prepare=watch, collect=lambda session: max(most))
    assert found.extra == {0: 4, 1: 4}


def test_tokens_that_do_not_divide_over_the_ranks_of_a_stage_are_refused_before_anything_is_sent() -> None:
    model = Llama(T0)
    program = build(model, het3())

    def work(world: World) -> Any:
        session = start(model, program, world, ADAM, torch.float32, 7)
        batches = [micro_batch([D0[0][:length]]) for length in (8, 7, 8)]
        if world.rank == 2:
            # TP1 can cut any number; it would wait for ever for what the others refuse to send.
            return None
        with pytest.raises(GraphError) as refused:
            session.step(batches)
        return str(refused.value)

    found = run_ranks(range(3), work, 30)
    assert found[0] == found[1]
    assert "T is 7, but must divide by 2" in found[0]


def test_a_gradient_that_is_not_finite_ends_all_ranks_alike_when_it_must_not_be_skipped() -> None:
    model = Llama(T0)
    program = build(model, het4())

    def work(world: World) -> Any:
        session = start(model, program, world, ADAM, torch.float32, 7)

        def spoil(slot: Any, gradient: torch.Tensor, divisor: float) -> None:
            if world.rank == 2 and slot.name == "layers.3.wq.weight":
                gradient[0, 0] = float("inf")

        session.gradient_hook = spoil
        before = session.state.master.clone()
        number, _ = program.pipeline_of(world.rank)
        documents = [D0[:3], D0[3:4]][number]
        with pytest.raises(RuntimeFailure) as ended:
            session.step([micro_batch([document], 2) for document in documents], skip_nonfinite=False)
        return str(ended.value), torch.equal(session.state.master, before)

    message = (
        "iteration 1: gradient not finite on rank 2 (layers.3.wq.weight); no rank has updated its weights"
    )
    assert run_ranks(range(4), work, 30) == dict.fromkeys(range(4), (message, True))


def test_more_micro_batches_do_not_wait_for_the_device_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a number off a GPU is to wait for all that was queued before; ids are checked on the CPU only."""
    for module in (embedding, cross_entropy):
        monkeypatch.setattr(module, "check_ids", lambda *_: None)

    def reads(count: int) -> int:
        def work(world: World) -> int:
            model = Llama(T0)
            session = start(
                model, build(model, strategy((count, 1, [stage("0", "0-3")]))), world, ADAM, torch.float32, 7
            )
            with Live() as watched:
                session.step([micro_batch([row]) for row in D0[:count]])
            return watched.calls.get("aten::_local_scalar_dense", 0)

        return run_ranks(range(1), work, 30)[0]

    assert reads(4) == reads(1)


def test_the_kinds_of_time_never_add_up_to_more_than_the_step_though_others_wait_for_a_late_rank() -> None:
    found = train(
        strategy((1, 1, [stage("0", "0-3")]), (1, 1, [stage("1", "0-3")])),
        [D0[:2]] * 2,
        before_step=lambda session, _: time.sleep(0.5 * (session.world.rank == 0)),
    )
    for result in found.results:
        kinds = sum(seconds for kind, seconds in result.seconds.items() if kind != "step")
        assert 0 < kinds <= result.seconds["step"]
