"""CommPlans on real processes end where the numpy oracle says."""

import random

import numpy as np
import torch

from hetero_megatron.annotation import Annotation, DeviceGroup
from hetero_megatron.comm import CommPlan, interpret, resolve, shard
from hetero_megatron.comm.steps import Collective
from hetero_megatron.errors import ReshardError
from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.world import Groups, World
from tests.comm.test_property import across, aligned, inside, same_groups
from tests.distributed.ranks import run_ranks

RANKS = tuple(range(8))
SHAPES = ((97, 7), (12, 24), (5, 3))


def relabel(annotation: Annotation, names: dict[int, int]) -> Annotation:
    groups = tuple(
        DeviceGroup(tuple(names.setdefault(rank, len(names)) for rank in group))
        for group in annotation.groups
    )
    return Annotation(groups, annotation.states, annotation.hdim)


def some_plans(count: int, seed: int) -> list[CommPlan]:
    """Plans whose ranks are the same before and after, on at most 8 ranks, of every kind."""
    rng, plans = random.Random(seed), []
    while len(plans) < count:
        before, after = rng.choice((same_groups, inside, across, aligned))(rng)
        if set(before.ranks) != set(after.ranks) or len(before.ranks) > len(RANKS):
            continue
        names: dict[int, int] = {}
        try:
            plans.append(resolve(relabel(before, names), relabel(after, names)))
        except ReshardError:
            continue
    return plans


def test_every_kind_of_plan_gives_the_oracles_shards_on_real_processes() -> None:
    plans = some_plans(160, seed=5)
    needed = {
        s.ranks for plan in plans for stage in plan.stages for s in stage.steps if isinstance(s, Collective)
    }
    labels = {operator for plan in plans for operator in plan.operators}
    assert {"AR", "RS", "AG", "BSR", "SplitAR", "SplitRS", "SplitAG"} <= labels, (
        f"too few kinds drawn: {labels}"
    )

    def work(world: World) -> list[list[np.ndarray] | None]:
        groups = Groups(world, needed)
        found: list[list[np.ndarray] | None] = []
        for number, plan in enumerate(plans):
            if world.rank not in plan.src.ranks:
                found.append(None)
                continue
            fulls = tensors(number)
            shapes = [full.shape for full in fulls]
            mine = [torch.from_numpy(shard(plan.src, full, number)[world.rank]) for full in fulls]
            exchange = Exchange(plan, world.rank, groups, shapes)
            found.append([tensor.numpy() for tensor in exchange.run(mine)])
        return found

    results = run_ranks(RANKS, work, 120)
    for number, plan in enumerate(plans):
        for place, full in enumerate(tensors(number)):
            wanted = interpret(plan, shard(plan.src, full, number), full.shape)
            for rank in plan.dst.ranks:
                np.testing.assert_array_equal(
                    results[rank][number][place], wanted[rank], f"plan {number}: {plan}"
                )


def tensors(number: int) -> list[np.ndarray]:
    """One or two whole-valued tensors, so that sums are exact and plans fuse."""
    rng = np.random.default_rng(number)
    shapes = [SHAPES[number % len(SHAPES)]] + ([SHAPES[(number + 1) % len(SHAPES)]] if number % 2 else [])
    return [rng.integers(-50, 50, shape).astype(np.float64) for shape in shapes]
