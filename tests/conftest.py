"""How many random strategies to draw, and from which seed on."""

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest -m fuzz --strategies 500` draws more; `--strategies 1 --strategies-from 137` draws one again."""
    group = parser.getgroup("fuzz")
    group.addoption("--strategies", type=int, default=60, help="how many random strategies to train (60)")
    group.addoption("--strategies-from", type=int, default=0, metavar="SEED", help="the first seed (0)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per strategy, named by its seed."""
    if "strategy_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("strategies_from")
        seeds = range(first, first + metafunc.config.getoption("strategies"))
        metafunc.parametrize("strategy_seed", seeds, ids=lambda seed: f"seed {seed}")


def pytest_configure() -> None:
    """Interrupts are tested; a shell that runs the tests in the background has them ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
