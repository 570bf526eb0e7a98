"""Every strategy trains exactly the model that one device would (PARITY, DESIGN §8)."""

import pytest

from hetero_megatron.strategy import Strategy
from tests.distributed.training import assert_parity, het3, het4, reference, sequences, stage, strategy, train

STEPS = tuple(sequences(24)[start : start + 4] for start in (0, 4, 8))

LAYOUTS = {
    "TP2": strategy((2, 2, [stage("0-1", "0-3")])),
    "PP2": strategy((4, 1, [stage("0", "0-1"), stage("1", "2-3")])),
    "DP2": strategy((1, 2, [stage("0", "0-3")]), (2, 1, [stage("1", "0-3")])),
    "HET3": het3(),
    "HET4": het4(),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_equal_one_device(name: str, sequence_parallel: bool) -> None:
    from dataclasses import replace

    plan: Strategy = replace(LAYOUTS[name], sequence_parallel=sequence_parallel)
    assert_parity(train(plan, STEPS), reference(STEPS))
