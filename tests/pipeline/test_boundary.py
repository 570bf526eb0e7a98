"""Which part of the model follows which (paper A.2)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.boundary import Boundaries


def test_a_chain_leads_from_stage_to_stage_and_on_to_the_next_chunk() -> None:
    assert Boundaries.chain(2, 2).pairs == (((0, 0), (1, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 1)))
    assert Boundaries.chain(1).pairs == ()


def test_a_send_and_its_receive_are_each_others_peer() -> None:
    chain = Boundaries.chain(3, 2)
    for stage, text in (
        (0, "SEND_F4"),
        (1, "RECV_F4"),
        (1, "SEND_B2"),
        (2, "RECV_B0"),
        (2, "SEND_F1"),
        (0, "SEND_B0.1"),
    ):
        item = Action.parse(text)
        peer = chain.peer(stage, item)
        assert peer is not None
        assert chain.peer(*peer) == (stage, item)
    assert chain.peer(2, Action.parse("SEND_F1")) == (0, Action.parse("RECV_F1.1"))


def test_the_ends_of_the_chain_have_no_peer() -> None:
    chain = Boundaries.chain(2)
    assert chain.peer(0, Action.parse("RECV_F0")) is None
    assert chain.peer(1, Action.parse("SEND_F0")) is None


def test_two_chunks_on_one_stage_need_no_wire() -> None:
    v_shape = Boundaries((((0, 0), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (0, 1))))
    assert v_shape.receives_from(1, Action.parse("F0.1")) is None
    assert v_shape.sends_to(1, Action.parse("F0")) is None
    assert v_shape.peer(1, Action.parse("SEND_F0")) is None
    assert v_shape.receives_from(0, Action.parse("F0.1")) == (1, 1)


def test_a_place_with_two_successors_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 chunk 0 has 2 places after it, not 1"):
        Boundaries((((0, 0), (1, 0)), ((0, 0), (2, 0))))
    with pytest.raises(ScheduleError, match="stage 2 chunk 0 has 2 places before it, not 1"):
        Boundaries((((0, 0), (2, 0)), ((1, 0), (2, 0))))
