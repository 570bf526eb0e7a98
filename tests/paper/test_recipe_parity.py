"""Every strategy of the paper, at its own ranks, degrees and stages, trains the model that one device would.

Width and depth are reduced (`tests/paper/reduced.py`), so that the up to 48 ranks fit on this machine.
"""

from dataclasses import replace

import pytest

from hetero_megatron.runtime.optimizer import OptimizerSettings
from tests.distributed.training import T0, assert_parity, reference, sequences, train
from tests.paper.files import NAMES, ready
from tests.paper.reduced import reduce

STEPS = 2
# A small rate: Adam turns the rounding of a gradient near zero into a difference of up to lr.
SETTINGS = OptimizerSettings(lr=1e-3, eps=1e-4, train_iters=100)


@pytest.mark.parametrize("name", NAMES)
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
