"""Actions print and read back (paper §6.3)."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import KINDS, Action, Batch, parse_steps, spell_steps


@pytest.mark.parametrize("text", ["F0", "B3", "SEND_F0", "RECV_B1", "F0.1", "SEND_B12.3"])
def test_an_action_prints_as_it_is_read(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_every_kind_reads_back() -> None:
    for kind in KINDS:
        for chunk in (0, 2):
            action = Action(kind, 7, chunk)
            assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "X3", "F-1", "F0.0", "F00", "SEND0", "SENDF0", "f0", "F0 ", "F0.1.2"]
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is no action: write one of F, B, SEND_F.* such as F0"):
        Action.parse(text)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ScheduleError, match="action kind 'W' is unknown; known: F, B, SEND_F"):
        Action("W", 0)  # type: ignore[arg-type]  # the wrong kind is the point


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="micro-batch -1 and chunk 0 count from 0"):
        Action("F", -1)


def test_a_batch_holds_communication_only() -> None:
    with pytest.raises(ScheduleError, match=r"batch \{SEND_F0 B0\} holds B0, which computes"):
        Batch((Action("SEND_F", 0), Action("B", 0)))
    with pytest.raises(ScheduleError, match="a batch without items: leave it out"):
        Batch(())


def test_a_line_of_steps_reads_back() -> None:
    line = "F0 {SEND_F0 RECV_F1} F1 {SEND_F1 RECV_B0} B0 B1.1"
    steps = parse_steps(line)
    assert spell_steps(steps) == line
    assert len(steps) == 6


def test_payload_leaves_the_direction_out() -> None:
    assert [Action.parse(text).payload for text in ("SEND_F2", "RECV_B1.3", "F4")] == ["F2", "B1.3", "F4"]
