"""SIGTERM and SIGINT: remembered, passed on to the ranks, and the second SIGINT interrupts."""

import os
import signal
import time
from pathlib import Path

import pytest

from hetero_megatron.runtime.launch import Rendezvous, fork_ranks
from hetero_megatron.runtime.stopping import StopRequest


def test_a_request_remembers_the_first_signal_and_takes_any_number_of_sigterm() -> None:
    request = StopRequest()
    with request.listening():
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == "SIGTERM"


def test_a_second_sigint_interrupts_at_once() -> None:
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert request
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_as_before_when_listening_ends() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest().listening():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_are_asked_through_their_parent_finish_and_succeed(tmp_path: Path, number: int) -> None:
    request = StopRequest()

    def main(rendezvous: Rendezvous) -> None:
        (tmp_path / f"{rendezvous.index} runs").touch()
        if rendezvous.index == 0:
            while not (tmp_path / "1 runs").exists():
                time.sleep(0.005)
            os.kill(os.getppid(), number)
        until = time.monotonic() + 10
        while not request and time.monotonic() < until:
            time.sleep(0.005)
        (tmp_path / f"{rendezvous.index} {request.signal}").touch()

    with request.listening():
        assert fork_ranks(2, main, timeout_s=20, request=request) == 0
    assert {"0 SIGTERM", "1 SIGTERM"} <= {path.name for path in tmp_path.iterdir()}
