"""Between two strategies drawn by seed a run goes on as if it had never changed.

`pytest -m fuzz --strategies 30` draws more of them, `--strategies 1 --strategies-from SEED` one of them again.
"""

from dataclasses import replace

import pytest

from tests.distributed.random_strategies import STEPS, draw_two
from tests.distributed.switching import KINDS, outcome_of, run_pairs
from tests.distributed.test_switch import assert_moved
from tests.distributed.training import assert_parity, reference


def assert_goes_on(seed: int) -> None:
    first, second = draw_two(seed)
    print(f"--strategies 1 --strategies-from {seed} draws\n{first}\n{second.strategy}")
    programs, (courses,) = run_pairs(
        {"first": first.strategy, "second": second.strategy},
        [("first", "second")],
        first.steps,
        STEPS,
        first.config,
        first.settings,
        bucket_elements=first.bucket_elements,
        message_bytes=(1 << 30, 10_000)[seed % 2],
    )
    adam = first.settings.name == "adam"
    assert_moved(programs, courses, KINDS if adam else KINDS[:2])
    wanted = reference(first.steps, first.config, first.settings)
    rest = replace(wanted, losses=wanted.losses[STEPS:], norms=wanted.norms[STEPS:])
    assert_parity(outcome_of(programs["second"], courses), rest)


@pytest.mark.parametrize("seed", range(3))
def test_a_switch_between_two_strategies_drawn_by_seed(seed: int) -> None:
    assert_goes_on(seed)


@pytest.mark.fuzz
def test_a_random_switch_goes_on_as_one_device(strategy_seed: int) -> None:
    assert_goes_on(strategy_seed)
