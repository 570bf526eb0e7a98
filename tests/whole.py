"""Whether all cases of a proof were asked for, or those that fit every run of the tests."""

import pytest


def all_are_asked_for(config: pytest.Config) -> bool:
    """Under `pytest -m fuzz`."""
    return "fuzz" in config.getoption("markexpr")
