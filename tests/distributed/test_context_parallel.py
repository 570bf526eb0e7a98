"""Context parallelism trains exactly the model that one device would (PARITY), whatever the parts are."""

from dataclasses import replace

import pytest
import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Strategy
from tests.distributed.test_bf16 import BF16_LOSS_RTOL
from tests.distributed.training import (
    T0,
    assert_parity,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)
# Documents of odd lengths, one token, two and three tokens, and whole ones.
MIXED = tuple(
    tuple(document[:length] for document, length in zip(D0[at : at + 6], (15, 1, 2, 3, 16, 7), strict=True))
    for at in (0, 6, 12)
)

LAYOUTS = {
    "CP2": strategy((2, 3, [stage("0-1", "0-3", cp=2)])),
    "CP2xTP2": strategy((2, 3, [stage("0-3", "0-3", cp=2)])),
    "CP3": strategy((2, 3, [stage("0-2", "0-3", cp=3)])),
    "CP4": strategy((1, 6, [stage("0-3", "0-3", cp=4)])),
    "CP2 PP2": strategy((6, 1, [stage("0-1", "0-1", cp=2), stage("2-3", "2-3", cp=2)])),
    "CP2 PP2 of unequal TP": strategy((3, 2, [stage("0-3", "0-2", cp=2), stage("4-5", "3", cp=2)])),
    "DP2xCP2": strategy((2, 2, [stage("0-1", "0-3", cp=2)]), (1, 2, [stage("2-3", "0-3", cp=2)])),
    "CP2 beside TP2": strategy((2, 2, [stage("0-1", "0-3", cp=2)]), (2, 1, [stage("2-3", "0-3")])),
    "TP2+TP1": strategy((2, 3, [stage("0-2", "0-3", tp=(2, 1))])),
    "TP1+TP2 beside TP1": strategy((2, 2, [stage("1-3", "0-3", tp=(1, 2))]), (1, 2, [stage("0", "0-3")])),
    "kv copies TP4+TP2": strategy((2, 3, [stage("0-5", "0-3", tp=(4, 2))])),
    "kv copies TP4+TP4": strategy((2, 3, [stage("0-7", "0-3", cp=2)])),
    "ranks not in order": strategy((2, 3, [replace(stage("0-3", "0-3", cp=2), ranks=(2, 0, 1, 3))])),
}
ULYSSES = (
    "CP2",
    "CP2xTP2",
    "CP4",
    "CP2 PP2",
    "CP2 PP2 of unequal TP",
    "DP2xCP2",
    "CP2 beside TP2",
    "ranks not in order",
)
EIGHT_HEADS = replace(T0, num_attention_heads=8)


def check(plan: Strategy, config: LlamaConfig = T0) -> None:
    found = train(plan, MIXED, config=config, settings=SGD, timeout_s=120)
    assert_parity(found, reference(MIXED, config=config, settings=SGD))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ring_attention_trains_like_one_device(name: str, sequence_parallel: bool) -> None:
    check(replace(LAYOUTS[name], sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_trains_like_one_device(name: str, sequence_parallel: bool) -> None:
    check(replace(LAYOUTS[name], sequence_parallel=sequence_parallel, context_parallel="ulysses"))


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["DP2xCP2", "CP2 beside TP2"])
def test_zero_1_cuts_states_over_context_parallel_parts_too(name: str, mode: str) -> None:
    check(replace(LAYOUTS[name], zero=1, context_parallel=mode))


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_a_bf16_run_learns_like_the_fp32_model_of_one_device(mode: str) -> None:
    steps = [sequences(4)] * 12
    plan = strategy((2, 2, [stage("0-3", "0-3", cp=2)]), context_parallel=mode)
    found = train(plan, steps, dtype=torch.bfloat16)
    wanted = reference(steps)
    assert wanted.losses[-1] < 0.5 * wanted.losses[0], "it learns, so that equal losses mean something"
    assert found.losses == pytest.approx(wanted.losses, rel=BF16_LOSS_RTOL, abs=0)
    assert not any(result.skipped for result in found.results)
