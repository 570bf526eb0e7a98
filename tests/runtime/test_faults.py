"""Faults on purpose: what may be planned, and that each strikes once."""

import time

import pytest

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.faults import Fault, Faults


def test_a_fault_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"fault 'burn' is unknown; known: kill, stop, delay, drop"):
        Fault("burn", 0, 1, "forward")


def test_a_fault_in_no_phase_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"a fault in 'lunch': a step has the phases starting, between"):
        Fault("kill", 0, 1, "lunch")


def test_a_fault_strikes_its_rank_at_its_occurrence_once() -> None:
    faults = Faults([Fault("delay", 1, 2, "forward", occurrence=2, seconds=0.2)])

    def seconds(rank: int, phase: str, iteration: int) -> float:
        began = time.monotonic()
        faults.strike(rank, phase, iteration)
        return time.monotonic() - began

    assert seconds(1, "forward", 2) < 0.1
    assert seconds(0, "forward", 2) < 0.1
    assert seconds(1, "backward", 2) < 0.1
    assert seconds(1, "forward", 2) >= 0.2
    assert seconds(1, "forward", 2) < 0.1
