"""The layout of C2: five stages of TP 4, 4, 4, 2, 1 beside four of TP 4, on 31 ranks (paper Figure 19).

Ranks and degrees are the paper's. The sizes are a quarter and less: 15 layers for 60, 5 + 4 micro-batches for
33 + 31. `test_recipe_parity.py` trains the same layout, with 8 layers and with all 60; this one runs by `pytest -m fuzz`.
"""

from dataclasses import replace

import pytest

from tests.distributed.training import T0, assert_parity, reference, sequences, stage, strategy, train
from tests.whole import all_are_asked_for

CONFIG = replace(T0, num_layers=15, num_query_groups=4)
FOUR_STAGES = [stage("0-3", "0-3"), stage("4-7", "4-7"), stage("8-11", "8-11"), stage("12-15", "12-14")]
FIVE_STAGES = [
    stage("16-19", "0-3"),
    stage("20-23", "4-7"),
    stage("24-27", "8-11"),
    stage("28-29", "12-13"),
    stage("30", "14"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both kinds of activations, where they are asked for."""
    asked = all_are_asked_for(metafunc.config)
    metafunc.parametrize("sequence_parallel", [False, True] if asked else [])


@pytest.mark.fuzz
def test_five_uneven_stages_beside_four_even_ones_train_like_one_device(sequence_parallel: bool) -> None:
    documents = sequences(27)
    steps = [documents[at : at + 9] for at in (0, 9, 18)]
    plan = strategy((5, 1, FOUR_STAGES), (4, 1, FIVE_STAGES), sequence_parallel=sequence_parallel)
    assert len(plan.ranks) == 31
    found = train(plan, steps, config=CONFIG, timeout_s=110)
    assert_parity(found, reference(steps, config=CONFIG))
