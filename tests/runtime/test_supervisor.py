"""Supervisor and store: who is refused, who is ended, and what is said of it."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.membership import Coordinator, Halted, Member, Progress, View
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.runtime.supervisor import Limits, Node, Supervisor


def test_an_endpoint_that_is_taken_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        supervisor = Supervisor(Node((0,), port=port), lambda member: None)
        with pytest.raises(
            RuntimeFailure, match=rf"port {port} of this node is taken \(Address already in use\)"
        ):
            supervisor.run()


def test_ranks_that_agree_that_they_have_ended_end_the_run() -> None:
    def main(member: Member) -> None:
        member.enter()
        assert member.end((0, 1))

    assert Supervisor(Node((0, 1)), main).run(20) == 0


def test_a_refusal_of_one_rank_ends_the_run_for_all() -> None:
    def main(member: Member) -> None:
        member.enter()
        if member.rank:
            member.refuse("no")
        time.sleep(60)

    began = time.monotonic()
    assert Supervisor(Node((0, 1)), main).run(30) == 1
    assert time.monotonic() - began < 15


def test_a_rank_that_comes_no_further_is_ended_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    def main(member: Member) -> None:
        member.enter()
        member.note("forward", 7)
        time.sleep(60)

    assert Supervisor(Node((4,)), main, Limits(phase_s=0.3)).run(30) == 1
    told = capfd.readouterr().err
    assert "rank 4 has come no further for 0." in told
    assert "s, was ended in the forward pass of iteration 7 (noticed by the supervisor of node 0)" in told


def test_a_signal_goes_on_to_the_ranks() -> None:
    request = StopRequest()

    def main(member: Member) -> None:
        member.enter()
        while not request:
            time.sleep(0.01)
        assert member.end((0,))

    with request.listening():
        signal.raise_signal(signal.SIGTERM)
        assert Supervisor(Node((0,)), main, request=request).run(20) == 0


def stopped(store: dist.Store, view: View, rank: int, progress: Progress) -> None:
    store.set(f"stopped/{view.generation}/{rank}", json.dumps(asdict(progress)))
    store.add("events", 1)


def test_the_next_view_has_the_furthest_step_that_any_survivor_knows_to_count() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0, 1, 2))
    numbers = (4.0, 0.1 + 0.2, 1e-300)
    coordinator.lost(1, "rank 1 was killed")
    assert coordinator.poll() is None
    assert coordinator.waiting_for() == (0, 2)
    stopped(store, coordinator.view, 0, Progress(4, None, 0, 0, 4))
    assert coordinator.poll() is None
    stopped(store, coordinator.view, 2, Progress(5, numbers, 0, 1, 4))
    view = coordinator.poll()
    assert view is not None
    assert (view.generation, view.ranks, view.lost) == (1, (0, 2), {1: "rank 1 was killed"})
    assert (view.iteration, view.agreed, view.skipped, view.optimizer_steps) == (5, numbers, 1, 4)
    assert View.from_json(view.to_json()) == view
    assert View.from_json(store.get("view/1")) == view


def test_a_run_of_which_nobody_holds_anything_ends() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0, 1))
    coordinator.lost(0, "gone")
    stopped(store, coordinator.view, 1, Progress(-1))
    view = coordinator.poll()
    assert view is not None
    assert view.end == "nobody who is left holds a part of the model"


def test_a_run_that_stops_again_and_again_without_a_step_ends() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0, 1), patience_s=0.0)
    for _ in range(7):
        for rank in (0, 1):
            stopped(store, coordinator.view, rank, Progress(3, base=coordinator.view.generation))
        view = coordinator.poll()
        assert view is not None
    assert "times in a row ranks have stopped without having made a step" in view.end


def test_who_wants_to_join_is_taken_in_when_all_have_stopped() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0,))
    coordinator.join((1,))
    assert coordinator.poll() is None
    stopped(store, coordinator.view, 0, Progress(2, base=0))
    view = coordinator.poll()
    assert view is not None
    assert (view.ranks, view.joined, view.iteration) == ((0, 1), (1,), 2)
    assert store.get("enter/1") == b"1"


def test_who_has_joined_a_recovery_that_failed_still_holds_nothing() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0, 1))
    coordinator.join((2,))
    for rank in (0, 1):
        stopped(store, coordinator.view, rank, Progress(2))
    first = coordinator.poll()
    assert first is not None
    assert first.joined == (2,)
    coordinator.lost(1, "gone")
    stopped(store, first, 0, Progress(2, base=0))
    stopped(store, first, 2, Progress(-1))
    second = coordinator.poll()
    assert second is not None
    assert (second.ranks, second.joined, second.base) == ((0, 2), (2,), 0)
    # In the next one its layout was complete.
    for rank in (0, 2):
        stopped(store, second, rank, Progress(3, base=2))
    coordinator.lost(0, "gone")
    third = coordinator.poll()
    assert third is not None
    assert (third.ranks, third.joined) == ((2,), ())


def test_who_wants_to_join_and_is_lost_before_is_not_taken_in() -> None:
    store = dist.HashStore()
    coordinator = Coordinator(store, (0,))
    coordinator.join((1,))
    coordinator.lost(1, "gone again")
    stopped(store, coordinator.view, 0, Progress(2))
    view = coordinator.poll()
    assert view is not None
    assert (view.ranks, view.joined) == ((0,), ())


def test_a_wait_for_others_ends_when_one_of_them_is_lost() -> None:
    def main(member: Member) -> None:
        member.enter()
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for wait in (lambda: member.wait_for_all("there", (0, 1)), lambda: member.share("word", None)):
            with pytest.raises(Halted, match="another rank was lost while this one waited"):
                wait()
        assert member.stop(Progress(0)).ranks == (0,)
        assert member.share("word", "said") == member.share("word", None) == "said"
        member.wait_for_all("there", (0,))
        assert member.end((0,))

    assert Supervisor(Node((0, 1)), main).run(20) == 0


def test_a_node_whose_store_is_gone_says_so() -> None:
    nodes = {0: (0,), 1: (1,)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def stays(member: Member) -> None:
        member.enter()
        time.sleep(60)

    first = os.fork()
    if not first:
        with contextlib.suppress(BaseException):
            Supervisor(Node((0,), 0, nodes, "127.0.0.1", port, 2), stays).run(60)
        os._exit(0)
    killer = threading.Timer(3.0, os.kill, (first, signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(
            RuntimeFailure, match=rf"node 1 has lost the store at 127.0.0.1:{port}: the supervisor"
        ):
            Supervisor(Node((1,), 1, nodes, "127.0.0.1", port, 2), stays).run(30)
    finally:
        killer.join()
        os.waitpid(first, 0)


def test_the_end_of_a_run_is_told_to_whoever_waits_for_the_next_view(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def main(member: Member) -> None:
        member.enter()
        if member.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        member.stop(Progress(-1))

    assert Supervisor(Node((0, 1)), main).run(20) == 1
    assert "error: nobody who is left holds a part of the model" in capfd.readouterr().err
