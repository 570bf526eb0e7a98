"""Every strategy of the paper, at its own ranks, degrees and stages, trains the model that one device would.

Width and depth are reduced (`tests/paper/reduced.py`), so that the up to 48 ranks fit on this machine.

Recipes of one essence, which differ in nothing but how many ranks, stages and micro-batches there are, are trained by one
of them, that with the fewest ranks. `pytest -m fuzz tests/paper` trains all of them.
"""

from dataclasses import replace

import pytest

from hetero_megatron.runtime.optimizer import OptimizerSettings
from tests.distributed.training import T0, assert_parity, reference, sequences, train
from tests.paper.files import NAMES, ready, written
from tests.paper.reduced import essence, reduce
from tests.whole import all_are_asked_for

STEPS = 2
# A small rate: Adam turns the rounding of a gradient near zero into a difference of up to lr.
SETTINGS = OptimizerSettings(lr=1e-3, eps=1e-4, train_iters=100)
UNEQUAL = ("c2", "c6")
"""What the paper is about, and alike in essence: pipelines of five and of four or six stages, of TP 4, 2 and 1."""


def representatives() -> list[str]:
    """One recipe of each essence, and all of the most uneven one."""
    by_size = sorted(NAMES, key=lambda name: (len(written(name).make_strategy().ranks), name))
    smallest = {essence(reduce(written(name))): name for name in reversed(by_size)}
    return sorted({*smallest.values(), *UNEQUAL})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All recipes where they are asked for."""
    if "name" in metafunc.fixturenames:
        asked = all_are_asked_for(metafunc.config)
        metafunc.parametrize("name", NAMES if asked else representatives())


def test_every_recipe_is_alike_in_essence_to_one_that_is_trained() -> None:
    trained = {essence(reduce(written(name))) for name in representatives()}
    assert trained == {essence(reduce(written(name))) for name in NAMES}
    assert 20 <= len(representatives()) < len(NAMES)


@pytest.mark.fuzz
def test_a_recipe_trains_like_one_device(name: str) -> None:
    reduced = reduce(ready(name))
    steps = reduced.steps(STEPS)
    found = train(reduced.strategy, steps, config=reduced.config, settings=SETTINGS, timeout_s=110)
    assert_parity(found, reference(steps, config=reduced.config, settings=SETTINGS))


@pytest.mark.timeout(300)
def test_c2_trains_with_all_60_layers_and_33_and_31_micro_batches() -> None:
    """C2 as Table 11 has it, in everything but width and the length of a row.

    Whole tokens between blocks, which takes half the collectives; the reduced C2 above splits them.
    """
    strategy = replace(ready("c2").make_strategy(), sequence_parallel=False)
    config = replace(T0, num_layers=60, num_query_groups=4)
    steps = [sequences(64, length=8)]
    found = train(strategy, steps, config=config, settings=SETTINGS, timeout_s=280)
    assert (found.results[0].valid_tokens, len(found.shards)) == (64 * 7, 31)
    assert_parity(found, reference(steps, config=config, settings=SETTINGS))
