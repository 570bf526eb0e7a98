"""Communication between compute actions (paper A.2; O-35)."""

from collections import defaultdict

import pytest

from hetero_megatron.pipeline.action import Action, Batch
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.dry_run import dry_run
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.schedule import SCHEDULES, interleaved, one_f_one_b

PLAIN = ("gpipe", "1f1b")  # one chunk per stage, any number of stages


def test_1f1b_exchanges_forward_and_backward_in_one_batch() -> None:
    assert str(lower(one_f_one_b(2, 3))) == (
        "stage 0: F0 {SEND_F0} F1 {SEND_F1 RECV_B0} B0 F2 {SEND_F2 RECV_B1} B1 {RECV_B2} B2\n"
        "stage 1: {RECV_F0} F0 B0 {SEND_B0 RECV_F1} F1 B1 {SEND_B1 RECV_F2} F2 B2 {SEND_B2}"
    )


def test_one_stage_communicates_nothing() -> None:
    assert str(lower(one_f_one_b(1, 2))) == "stage 0: F0 B0 F1 B1"


def test_no_micro_batches_means_no_actions() -> None:
    actions = lower(one_f_one_b(3, 0))
    assert actions.stages == ((), (), ())
    assert actions.micro_batches == 0


def test_compute_gives_back_the_tasks() -> None:
    tasks = one_f_one_b(4, 7)
    actions = lower(tasks)
    assert actions.compute == tasks
    assert actions.micro_batches == 7


def messages(
    actions: PipelineActions,
) -> tuple[dict[tuple[int, int], list[Action]], dict[tuple[int, int], list[Action]]]:
    """Per (sending stage, receiving stage): the order at the sender and at the receiver, as sends."""
    sent, received = defaultdict(list), defaultdict(list)
    for stage, steps in enumerate(actions.stages):
        for item in (item for step in steps if isinstance(step, Batch) for item in step.items):
            peer = actions.boundaries.peer(stage, item)
            assert peer is not None
            if item.is_send:
                sent[stage, peer[0]].append(item)
            else:
                received[peer[0], stage].append(peer[1])
    return dict(sent), dict(received)


@pytest.mark.parametrize("name", PLAIN)
def test_messages_between_two_stages_have_one_order(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(13):
            sent, received = messages(lower(SCHEDULES[name](stages, micro_batches, 1)))
            assert sent == received


def test_interleaved_messages_between_two_stages_have_one_order() -> None:
    """From stage 0 to stage 1 go forwards of every chunk and, wrapped around, backwards of chunks 1 and 2."""
    places = [(stage, chunk) for chunk in range(3) for stage in range(2)]
    program = [(place, Action("F", m, place[1])) for m in range(2) for place in places]
    program += [(place, Action("B", m, place[1])) for m in range(2) for place in reversed(places)]
    tasks = tuple(tuple(action for place, action in program if place[0] == stage) for stage in range(2))
    sent, received = messages(lower(tasks))
    assert sent == received
    assert len(sent[0, 1]) == 2 * (3 + 2)


def test_a_batch_holds_at_most_one_send_and_one_receive() -> None:
    for steps in lower(one_f_one_b(4, 9)).stages:
        for batch in (step for step in steps if isinstance(step, Batch)):
            assert [item.is_send for item in batch.items] in ([True], [False], [True, False])


def test_given_boundaries_are_used() -> None:
    tasks = (tuple(map(Action.parse, ("F0", "F0.1", "B0.1", "B0"))),) * 2
    v_shape = Boundaries((((0, 0), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (0, 1))))
    assert str(lower(tasks, v_shape, early=False)) == (
        "stage 0: F0 {SEND_F0 RECV_F0.1} F0.1 B0.1 {SEND_B0.1 RECV_B0} B0\n"
        "stage 1: {RECV_F0} F0 F0.1 {SEND_F0.1 RECV_B0.1} B0.1 B0 {SEND_B0}"
    )


@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("stages", range(2, 7))
def test_the_interleaved_schedule_sends_and_receives_in_one_order(stages: int, chunks: int) -> None:
    for micro_batches in range(14):
        sent, received = messages(lower(interleaved(stages, micro_batches, chunks)))
        assert sent == received
        lowered = sum(len(own) for own in sent.values())
        assert lowered == 2 * micro_batches * (stages * chunks - 1)


def test_with_several_chunks_an_input_is_received_when_it_is_sent() -> None:
    """Stage 1 has F1.1's input before B0.1 and needs it after it."""
    assert str(lower(interleaved(2, 2, 2))) == (
        "stage 0: F0 {SEND_F0} F1 {SEND_F1 RECV_F0.1} F0.1 {SEND_F0.1 RECV_F1.1} F1.1 {SEND_F1.1} {RECV_B0.1} "
        "B0.1 {SEND_B0.1} {RECV_B1.1} B1.1 {SEND_B1.1 RECV_B0} B0 {RECV_B1} B1\n"
        "stage 1: {RECV_F0} F0 {SEND_F0 RECV_F1} F1 {SEND_F1 RECV_F0.1} F0.1 {RECV_F1.1} B0.1 {SEND_B0.1} F1.1 "
        "{RECV_B0} B1.1 {SEND_B1.1} B0 {SEND_B0 RECV_B1} B1 {SEND_B1}"
    )


def test_early_receives_stay_out_of_one_chunk_unless_asked_for() -> None:
    assert str(lower(one_f_one_b(2, 3), early=True)) == (
        "stage 0: F0 {SEND_F0} F1 {SEND_F1} {RECV_B0} B0 F2 {SEND_F2 RECV_B1} B1 {RECV_B2} B2\n"
        "stage 1: {RECV_F0} F0 {RECV_F1} B0 {SEND_B0} F1 B1 {SEND_B1 RECV_F2} F2 B2 {SEND_B2}"
    )


def test_early_receives_of_an_order_that_never_ends_are_left_to_check() -> None:
    order = tuple(map(Action.parse, ("B0", "F0")))
    assert lower((order, order), early=True) == lower((order, order))


def test_several_chunks_can_be_received_late_where_asked_for() -> None:
    tasks = interleaved(2, 4, 2)
    assert lower(tasks) != lower(tasks, early=False)
    assert dry_run(lower(tasks, early=False)).stuck == (0, 1)
    assert dry_run(lower(tasks)).stuck == ()
