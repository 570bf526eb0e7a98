"""The oracle itself: it shards, assembles, and notices a missing or wrong step."""

import re
from dataclasses import replace

import numpy as np
import pytest

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import Copy, assemble, interpret, resolve, shard
from hetero_megatron.errors import ReshardError

SHAPE = (7, 5)
FULL = np.arange(35.0).reshape(SHAPE)


def union(hdim: int) -> Annotation:
    groups = (DeviceGroup((3, 0, 5, 6)), DeviceGroup((1, 2)))
    return Annotation(groups, (DistributedStates.of({-2: 2, -1: 2}), DistributedStates.of({1: 2})), hdim)


@pytest.mark.parametrize("hdim", [-2, -1, 0, 1])
def test_assemble_undoes_shard(hdim: int) -> None:
    shards = shard(union(hdim), FULL, seed=3)
    assert np.array_equal(assemble(union(hdim), shards, SHAPE), FULL)
    assert np.array_equal(shards[3], shards[0])
    assert not np.array_equal(shards[3], shards[5])


def test_copies_that_differ_are_noticed_inside_and_across_subgroups() -> None:
    shards = shard(union(-1), FULL)
    with pytest.raises(
        ReshardError, match=re.escape("ranks 3 and 0 should hold equal copies of [whole], but differ")
    ):
        assemble(union(-1), shards | {0: shards[0] + 1}, SHAPE)
    with pytest.raises(ReshardError, match="subgroups 0 and 1 should hold the same tensor, but differ"):
        assemble(union(-1), shards | {2: shards[2] + 1}, SHAPE)


def test_a_missing_or_misshapen_shard_is_refused() -> None:
    src, dst = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
    shards = shard(src, FULL)
    with pytest.raises(ReshardError, match=re.escape("rank 1 has no shard of (0, 1){0: 2}")):
        interpret(resolve(src, dst), {0: shards[0]}, SHAPE)
    with pytest.raises(
        ReshardError, match=re.escape("rank 1 has a shard of shape (4, 5), its region of (7, 5) is (3, 5)")
    ):
        interpret(resolve(src, dst), {0: shards[0], 1: shards[0]}, SHAPE)


def test_every_single_step_matters() -> None:
    src = Annotation(
        (DeviceGroup((0, 1, 2)), DeviceGroup((3, 4))),
        (DistributedStates.of({-2: 3}), DistributedStates.of({-1: 2})),
        -2,
    )
    dst = Annotation(
        (DeviceGroup((0, 1, 2)), DeviceGroup((5, 4))),
        (DistributedStates.of({0: 3}), DistributedStates.of({1: 2})),
        1,
    )
    plan = resolve(src, dst)
    wanted = shard(dst, FULL)

    def lands(stages: tuple) -> bool:  # type: ignore[type-arg]  # stages of the plan under test
        result = interpret(replace(plan, stages=stages), shard(src, FULL), SHAPE)
        return all(np.array_equal(result[rank], wanted[rank]) for rank in dst.ranks)

    assert lands(plan.stages)
    for number, stage in enumerate(plan.stages):
        for step in stage.steps:
            left = replace(stage, steps=tuple(one for one in stage.steps if one is not step))
            assert not lands((*plan.stages[:number], left, *plan.stages[number + 1 :])), step
    assert any(isinstance(step, Copy) for stage in plan.stages for step in stage.steps)


def test_the_input_is_not_changed_by_an_in_place_plan() -> None:
    src, dst = Annotation.on((0, 1), {-2: 2}), Annotation.on((0, 1), {-1: 2})
    shards = shard(src, FULL)
    before = {rank: array.copy() for rank, array in shards.items()}
    interpret(resolve(src, dst), shards, SHAPE)
    assert all(np.array_equal(shards[rank], before[rank]) for rank in shards)
