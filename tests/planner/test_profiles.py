"""Profiles as data."""

import json
from dataclasses import replace

import pytest

from hetero_megatron.cluster import Link
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.curves import Curve
from hetero_megatron.planner.profiles import Kept, Measurement, Profiles, Transfer, Update

LAYER = Measurement("cpu", "fp32", "layer", "forward", 1, 1, 256, 128, 1e-3)
SAMPLE = Profiles(
    model={"hidden_size": 64},
    measurements=(LAYER, replace(LAYER, tp=2, seconds=6e-4)),
    transfers=(
        Transfer("loopback", "p2p", 2, 1000, 2e-4),
        Transfer("loopback", "p2p", 2, 2000, 3e-4),
        Transfer("loopback", "all_reduce", 2, 2000, 9e-4),
    ),
    updates=(Update("cpu", "fp32", 1000, 2e-3), Update("cpu", "fp32", 3000, 4e-3)),
    kept=(Kept("cpu", "fp32", "layer", 1, 1, 256, 128, 5120),),
    reserved_bytes={"cpu": 7},
    fixed_seconds={"cpu": 1e-3},
    notes="a machine",
)
LOOPBACK = Link("loopback", 3.0, 1e-5)


def test_a_profile_is_read_back_as_it_was_written() -> None:
    assert Profiles.from_json(SAMPLE.to_json()) == SAMPLE
    assert Profiles.from_json(Profiles().to_json()) == Profiles()


def test_messages_take_a_latency_and_a_rate() -> None:
    assert SAMPLE.transfer_seconds(LOOPBACK, "p2p", 2, 4000) == pytest.approx(5e-4)
    assert SAMPLE.transfer_seconds(LOOPBACK, "p2p", 2, 0) == 0.0
    assert SAMPLE.transfer_seconds(LOOPBACK, "p2p", 1, 100) == 0.0


def test_a_collective_that_was_not_measured_is_made_of_messages() -> None:
    """A ring: 2 (n - 1) messages of a part each for an all-reduce, half as many for the others."""
    message = SAMPLE.transfer_seconds(LOOPBACK, "p2p", 2, 1000)
    assert SAMPLE.transfer_seconds(LOOPBACK, "all_reduce", 4, 4000) == pytest.approx(6 * message)
    assert SAMPLE.transfer_seconds(LOOPBACK, "all_gather", 4, 4000) == pytest.approx(3 * message)


def test_without_measurements_a_link_gives_its_share_of_the_printed_bandwidth() -> None:
    ib = Link("ib", 50.0, 1e-5)
    assert Profiles().transfer_seconds(ib, "p2p", 2, 45e9) == pytest.approx(1.0 + 1e-5)
    gathered = Profiles().transfer_seconds(ib, "all_gather", 2, 90e9)
    assert gathered == pytest.approx(1.0 + 1e-5)
    assert Profiles().transfer_seconds(ib, "all_reduce", 2, 90e9) == pytest.approx(2 * gathered)


def test_an_update_is_linear_in_elements() -> None:
    assert SAMPLE.update_seconds("cpu", "fp32", 2000) == pytest.approx(3e-3)
    assert SAMPLE.update_seconds("h20", "fp32", 2000) is None


def test_kept_bytes_are_in_proportion_to_tokens() -> None:
    assert SAMPLE.kept_bytes("cpu", "fp32", "layer", 1, 512) == 10240
    assert SAMPLE.kept_bytes("cpu", "fp32", "layer", 2, 512) is None


def test_only_what_was_measured_has_a_curve() -> None:
    prior = Curve(0.0, 1e-6, 0.0)
    assert SAMPLE.curve("cpu", "fp32", 4, 1, "layer", "forward", prior) is None
    found = SAMPLE.curve("cpu", "fp32", 2, 1, "layer", "forward", prior)
    assert found is not None
    assert found.seconds(256, 256 * 128) == pytest.approx(6e-4)
    assert SAMPLE.measured_degrees("cpu", "fp32") == ((1, 1), (2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measurements": (replace(LAYER, unit="tail"),)}, r"'tail' 'forward' is no unit and phase"),
        ({"measurements": (replace(LAYER, tokens=0),)}, r"tp 1, cp 1, 0 tokens .* counts are 1 or more"),
        ({"measurements": (replace(LAYER, seconds=float("nan")),)}, r"took nan s"),
        ({"transfers": (Transfer("ib", "shout", 2, 1, 1.0),)}, r"'shout' of 1 bytes among 2 ranks on ib"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_have_been_measured_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        Profiles(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"profile: line 1 is no JSON"),
        ("[]", r"version None; this library reads version 1"),
        ('{"version": 9}', r"version 9; this library reads version 1"),
        ('{"version": 1, "model": 3}', r"model is 3; a number for each name is right"),
        (
            '{"version": 1, "updates": [{"kind": "cpu"}]}',
            r"updates\[0\] is .* it has the keys kind, precision",
        ),
    ],
)
def test_text_that_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        Profiles.from_json(text)


def test_the_file_has_one_measurement_per_line() -> None:
    lines = SAMPLE.to_json().splitlines()
    assert sum('"unit": "layer"' in line for line in lines) == 3
    assert json.loads(SAMPLE.to_json())["version"] == 1
