"""A run that loses ranks goes on in the others, as if nothing had happened."""

import os
import signal
import time
from functools import cache

import pytest

from hetero_megatron.runtime.board import Board
from hetero_megatron.runtime.faults import Fault
from hetero_megatron.runtime.launch import end_with_parent
from hetero_megatron.runtime.membership import Member
from hetero_megatron.runtime.supervisor import Limits, Node, Supervisor
from tests.distributed.surviving import Survival, survive
from tests.distributed.test_kill_matrix import plan
from tests.distributed.training import Outcome, assert_parity, reference, sequences, stage, strategy

DATA = tuple(sequences(4, seed=step) for step in range(5))


@cache
def undisturbed() -> Outcome:
    return reference(DATA)


def assert_went_on(found: Survival, lost: set[int], wanted: Outcome | None = None) -> None:
    """All but the lost ranks ended well in their first process, with the undisturbed run's losses and weights."""
    assert found.code == 0
    assert found.pids == {rank: pid for rank, pid in found.first_pids.items() if rank not in lost}
    assert_parity(found.outcome, wanted or undisturbed())
    for pid in found.first_pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_stopped_rank_is_ended_and_named_with_what_it_was_doing() -> None:
    fault = Fault("stop", 1, 2, "forward")
    found = survive(plan(0), DATA, [fault], limits=Limits(heartbeat_s=1.0))
    assert_went_on(found, {1})
    (recovery,) = found.recoveries[0]
    assert recovery.view.lost[1].startswith("rank 1 has shown no sign of life for 1.")
    assert recovery.view.lost[1].endswith("was ended in the forward pass of iteration 2")
    assert "noticed by rank" in str(recovery)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_that_one_survivor_knows_to_count_is_finished_by_those_who_had_not_heard(zero: int) -> None:
    """Ranks 0 and 1 lose their connections just as the others' agreement arrives; rank 3 is killed behind it."""

    def lose_the_answer(elastic, iteration: int) -> None:  # type: ignore[no-untyped-def]
        session, rank = elastic.session, elastic.member.rank
        if iteration != 3 or rank not in (0, 1) or elastic.recoveries:
            return
        ask = session._all_sum

        def lost(values):  # type: ignore[no-untyped-def]
            found = ask(values)
            # The targets alone are asked for first, by the tests' look at the gradients.
            if len(values) > 1:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection reset by peer")
            return found

        session._all_sum = lost

    found = survive(
        plan(zero), DATA, [Fault("kill", 3, 3, "committed")], in_step=lose_the_answer, copies=bool(zero)
    )
    assert_went_on(found, {3})
    recoveries = {rank: own[0] for rank, own in found.recoveries.items()}
    assert {rank: own.completed for rank, own in recoveries.items()} == {0: True, 1: True, 2: False}
    assert {own.iteration for own in recoveries.values()} == {3}
    # Nobody makes step 3 twice: rank 2 has made it in its place, the others from the gradients that they held.
    counted = {rank: [iteration for iteration, _ in own] for rank, own in found.commits.items()}
    assert counted == {0: [1, 2, 4, 5], 1: [1, 2, 4, 5], 2: [1, 2, 3, 4, 5]}


def test_two_ranks_may_go_at_once_and_another_while_the_state_moves() -> None:
    faults = [
        Fault("kill", 0, 2, "backward"),
        Fault("kill", 1, 2, "backward"),
        Fault("kill", 2, 1, "switching"),
    ]
    found = survive(plan(0), DATA, faults)
    assert_went_on(found, {0, 1, 2})


@pytest.mark.parametrize("occurrence", [1, 2], ids=["before all are there", "amid"])
def test_a_rank_that_is_lost_while_ranks_connect_keeps_nobody_waiting(occurrence: int) -> None:
    """A message may take 20 s here."""
    faults = [Fault("kill", 3, 3, "backward"), Fault("kill", 1, 2, "connecting", occurrence)]
    found = survive(plan(0, 2), DATA[:4], faults)
    assert_went_on(found, {1, 3}, reference(DATA[:4]))
    (recovery,) = found.recoveries[0]
    assert recovery.view.generation == 2
    assert recovery.view.lost[1] == "rank 1 was killed by SIGKILL in connecting of iteration 2"
    committed = {rank: dict(own) for rank, own in found.commits.items()}
    assert committed[0][3] - committed[0][2] < 10


def test_a_dropped_connection_loses_nobody() -> None:
    found = survive(plan(1), DATA[:3], [Fault("drop", 1, 2, "forward")], copies=True)
    assert_went_on(found, set(), reference(DATA[:3]))
    assert [recovery.view.ranks for recovery in found.recoveries[0]] == [(0, 1, 2, 3)]


def test_a_survivor_for_whom_there_is_no_work_waits_until_the_end() -> None:
    wide = strategy((2, 1, [stage("0-3", "0-3")]), (2, 1, [stage("4", "0-3")]))
    found = survive(wide, DATA, [Fault("kill", 2, 3, "backward")])
    assert_went_on(found, {2})
    assert found.recoveries[3][0].view.ranks == (0, 1, 3, 4)


def test_what_nobody_is_left_to_give_is_named_and_ends_a_run_without_checkpoints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone = strategy((4, 1, [stage("0", "0-1"), stage("1", "2-3")]))
    found = survive(alone, DATA, [Fault("kill", 1, 2, "forward")])
    assert found.code == 1
    told = capfd.readouterr().err
    assert "layers 2-3 (18 parameters)" in told
    assert "slices that only lost ranks owned (lost: 1)" in told
    assert "this run has no checkpoint to go back to" in told


def test_a_lost_rank_may_come_back_with_weights_moments_and_step() -> None:
    """Case O-67: all steps use the same four samples, whoever is there."""

    def wait(elastic, iteration: int) -> None:  # type: ignore[no-untyped-def]
        if iteration > 3 and not elastic.recoveries[-1].view.joined:
            while not elastic.member.is_awaited():
                time.sleep(0.01)
            elastic.stop_for_joining()

    found = survive(plan(0), DATA, [Fault("kill", 3, 3, "backward")], in_step=wait, returning=True)
    assert found.code == 0
    assert_parity(found.outcome, undisturbed())
    assert [recovery.view.joined for recovery in found.recoveries[0]] == [(), (3,)]
    assert sorted(found.pids) == [0, 1, 2, 3]


def test_who_joins_while_another_is_lost_holds_nothing_still() -> None:
    """Rank 4 comes back into a recovery that fails: the next one must not take it for an owner."""

    def wait(elastic, iteration: int) -> None:  # type: ignore[no-untyped-def]
        if iteration > 3 and not elastic.recoveries[-1].view.joined:
            while not elastic.member.is_awaited():
                time.sleep(0.01)
            elastic.stop_for_joining()

    # The second connecting of rank 1 is that for rank 4.
    faults = [Fault("kill", 4, 3, "backward"), Fault("kill", 1, 3, "connecting", 2)]
    found = survive(plan(1, 2), DATA, faults, in_step=wait, returning=True, copies=True)
    assert found.code == 0
    assert_parity(found.outcome, undisturbed())
    joined = [recovery.view.joined for recovery in found.recoveries[0]]
    assert joined[:2] == [(), (4,)]
    assert found.recoveries[0][1].view.lost.keys() == {1}
    assert {0, 2, 3, 4} <= set(found.pids)


def test_ranks_end_with_their_supervisor() -> None:
    parent, (reading, writing) = os.getpid(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            end_with_parent(parent)

            def main(member: Member) -> None:
                os.write(writing, f"{os.getpid()}\n".encode())
                time.sleep(60)

            Supervisor(Node((0, 1)), main).run()
        finally:
            os._exit(1)
    os.close(writing)
    told = b""
    while told.count(b"\n") < 2:
        told += os.read(reading, 100)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 5
    ranks = [int(each) for each in told.split()]
    while any(os.path.exists(f"/proc/{rank}/fd/0") for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{rank}/fd/0") for rank in ranks)


def test_the_board_says_what_a_rank_was_doing() -> None:
    board = Board(2)
    board.note(1, "backward", 4)
    assert str(board.read(0)) == "while starting"
    assert str(board.read(1)) == "in the backward pass of iteration 4"
    board.note(1, "between two steps", 5)
    assert str(board.read(1)) == "before iteration 5"
    board.note(1, "gradient sync", 5)
    assert str(board.read(1)) == "in gradient sync of iteration 5"
