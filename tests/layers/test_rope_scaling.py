"""Scaled rotary frequencies (case O-73), and what is refused."""

import pytest
import torch

from hetero_megatron.errors import ModelError
from hetero_megatron.layers import RopeScaling
from hetero_megatron.layers.rope_scaling import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 1024,
}


def test_the_frequencies_of_the_case_and_under_the_old_name_of_the_type() -> None:
    wanted = torch.tensor([1.0, 0.1, 0.003086761, 0.000125])
    old = {"type": "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}}
    for given in (LLAMA3, old):
        found = inverse_frequencies(8, 10000.0, RopeScaling.read(given))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_without_scaling_they_follow_from_theta_and_linear_divides_them() -> None:
    plain = inverse_frequencies(8, 500000.0, None)
    wanted = torch.tensor([1.0, 0.03760603, 0.00141421, 0.0000531830])
    torch.testing.assert_close(plain, wanted, rtol=0, atol=1e-8)
    linear = RopeScaling.read({"type": "linear", "factor": 4.0})
    assert torch.equal(inverse_frequencies(8, 500000.0, linear), plain / 4)
    assert RopeScaling.read(linear) is linear


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "foo"}, "rope_type 'foo' is not built; known: linear, llama3"),
        ({"rope_type": "yarn", "beta_fast": 32}, "rope_type 'yarn' is not built"),
        ({"factor": None}, "factor of rope_type llama3 is missing"),
        ({"factor": 0}, "factor of rope_type llama3 is 0; it must be a positive number"),
        ({"factor": "8"}, "factor of rope_type llama3 is '8'; it must be a positive number"),
        ({"low_freq_factor": None}, "low_freq_factor of rope_type llama3 is missing"),
        ({"high_freq_factor": 1}, "high_freq_factor 1 must exceed low_freq_factor 1"),
        ({"type": "linear"}, "rope_type 'llama3' and type 'linear' contradict each other"),
        ({"rope_type": "linear"}, "rope_type linear has no low_freq_factor; drop it"),
        ({"facter": 8}, "unknown key 'facter'; known: rope_type, factor, low_freq_factor"),
        ({"rope_type": None}, "rope_type is missing beside"),
    ],
)
def test_what_is_unknown_missing_or_contradictory_is_refused(change: dict[str, object], message: str) -> None:
    given = {key: value for key, value in {**LLAMA3, **change}.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        RopeScaling.read(given)


def test_a_missing_factor_and_what_is_no_mapping_are_refused() -> None:
    with pytest.raises(ModelError, match="factor of rope_type linear is missing"):
        RopeScaling.read({"rope_type": "linear"})
    with pytest.raises(ModelError, match="'llama3' is no mapping; write rope_type and factor"):
        RopeScaling.read("llama3")
