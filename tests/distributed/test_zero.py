"""ZeRO-1: states cut over pipelines, everything else as before (DESIGN decision 4)."""

import dataclasses

import pytest
import torch

from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    ADAM,
    T0,
    Outcome,
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

STEPS = [sequences(4, seed=step) for step in range(3)]


def replicas(count: int, tp: int = 1) -> Strategy:
    """Identical replicas of `tp` ranks, one micro-batch of up to four rows each."""
    return strategy(*((1, 4, [stage(f"{tp * n}-{tp * n + tp - 1}", "0-3")]) for n in range(count)), zero=1)


LAYOUTS = {
    "DP2": replicas(2),
    "DP3": replicas(3),
    "DP2xTP2": replicas(2, tp=2),
    "HET4": het4(zero=1),
    "HET4 without sequence parallelism": het4(zero=1, sequence_parallel=False),
    "TP4 beside TP1": strategy((1, 4, [stage("0-3", "0-3")]), (1, 4, [stage("4", "0-3")]), zero=1),
    "unequal stages": strategy(
        (2, 1, [stage("0-1", "0-1"), stage("2", "2-3")]),
        (1, 1, [stage("3", "0"), stage("4-5", "1-3")]),
        (1, 1, [stage("6", "0-3")]),
        zero=1,
    ),
    "one pipeline": strategy((4, 1, [stage("0-1", "0-2"), stage("2", "3")]), zero=1),
}


@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=LAYOUTS)
def test_zero_1_trains_the_model_of_one_device(plan: Strategy) -> None:
    assert_parity(train(plan, STEPS), reference(STEPS))


def test_moments_and_weights_are_those_of_whole_states_to_the_bit() -> None:
    """The sums are made in another order only where more than two ranks add up."""
    whole, cut = (train(dataclasses.replace(replicas(2), zero=zero), STEPS) for zero in (0, 1))
    for name, tensors in whole.tensors.items():
        for kind, tensor in tensors.items():
            assert torch.equal(cut.tensors[name][kind], tensor), f"{kind} of {name}"


def test_every_rank_holds_its_part_of_the_states_and_all_of_its_parameters() -> None:
    found = train(replicas(2), STEPS[:1])
    for shards in found.shards.values():
        assert sum(shard["parameter"].numel() for shard in shards.values()) == 43_296
        assert sum(shard["exp_avg"].numel() for shard in shards.values()) == 43_296 // 2


def test_clipping_and_weight_decay_see_every_element_once() -> None:
    settings = dataclasses.replace(ADAM, clip_grad=0.5, weight_decay=0.1)
    assert_parity(train(het4(zero=1), STEPS, settings=settings), reference(STEPS, settings=settings))


def test_bf16_weights_are_gathered_from_rounded_master_weights() -> None:
    def run(zero: int) -> Outcome:
        return train(het4(zero=zero), STEPS, dtype=torch.bfloat16)

    whole, cut = run(0), run(1)
    for name, tensors in cut.tensors.items():
        assert torch.equal(tensors["parameter"], tensors["master"].bfloat16().float()), name
    for found, wanted in zip(cut.losses, whole.losses, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_host_memory_change_nothing(zero: int, dtype: torch.dtype) -> None:
    here, host = (
        train(het4(zero=zero, offload_optimizer=offload), STEPS, dtype=dtype) for offload in (False, True)
    )
    assert host.losses == here.losses
    for name, tensors in here.tensors.items():
        for kind, tensor in tensors.items():
            assert torch.equal(host.tensors[name][kind], tensor), f"{kind} of {name}"


def test_sgd_has_no_moments_to_cut_but_master_weights() -> None:
    settings = OptimizerSettings(name="sgd", lr=0.1)
    assert_parity(train(replicas(3), STEPS, settings=settings), reference(STEPS, settings=settings))


def test_a_vocabulary_that_does_not_divide_is_cut_all_the_same() -> None:
    config = dataclasses.replace(T0, vocab_size=97)
    assert_parity(train(replicas(3), STEPS, config), reference(STEPS, config))
