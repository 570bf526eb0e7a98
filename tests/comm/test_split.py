"""SplitAR, SplitRS, SplitAG: slices, rank groups and copies (paper §5.2, Figure 9)."""

from collections import Counter

import numpy as np
import pytest

from hetero_megatron.annotation import FULL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import Collective, Transfer, interpret, resolve, shard

Subgroup = tuple[tuple[int, ...], dict[int, int]]


def union(hdim: int, *subgroups: Subgroup) -> Annotation:
    return Annotation(
        tuple(DeviceGroup(ranks) for ranks, _ in subgroups),
        tuple(DistributedStates.of(parts) for _, parts in subgroups),
        hdim,
    )


def test_three_tp_degrees_meet_in_four_slices() -> None:
    subgroups: tuple[Subgroup, ...] = (((0, 1, 2, 3), {0: 4}), ((4, 5), {0: 2}), ((6,), {}))
    (stage,) = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    assert stage.in_place
    assert stage.steps == tuple(
        Collective("all_reduce", ranks, FULL.cut(0, index, 4))
        for index, ranks in enumerate(((0, 4, 6), (1, 4, 6), (2, 5, 6), (3, 5, 6)))
    )


COPIES: tuple[Subgroup, ...] = (((6, 2), {-1: 2}), ((3, 4), {-1: 2}), ((7, 5), {-1: 2}))


def test_copies_whose_ranks_stand_in_another_order_get_the_sum_instead_of_adding_again() -> None:
    """Ascending, 3 6 7 would add subgroup 1 first and 2 4 5 subgroup 0: copies would not be equal to the last bit."""
    reduced, handed = resolve(union(-2, *COPIES), union(-1, *COPIES)).stages
    assert reduced.steps == (Collective("all_reduce", (6, 3, 7), FULL),)
    assert handed.steps == tuple(Transfer(src, dst, FULL) for src, dst in ((6, 2), (3, 4), (7, 5)))


@pytest.mark.parametrize(
    "subgroups",
    [
        COPIES[:2],
        (((0, 1), {-1: 2}), ((2, 3), {-1: 2}), ((4, 5), {-1: 2})),
        (((4, 3), {-1: 2}), ((1, 0), {-1: 2}), ((6, 5), {-1: 2})),
    ],
    ids=["two subgroups", "ascending", "in one order"],
)
def test_copies_that_add_in_one_order_add_side_by_side(subgroups: tuple[Subgroup, ...]) -> None:
    (stage,) = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    assert [step.ranks for step in stage.steps if isinstance(step, Collective)] == list(
        zip(*(ranks for ranks, _ in subgroups), strict=True)
    )


def test_copies_gather_side_by_side_in_any_order() -> None:
    (stage,) = resolve(union(0, *COPIES), union(-1, *COPIES)).stages
    assert [step.ranks for step in stage.steps if isinstance(step, Collective)] == [(6, 3, 7), (2, 4, 5)]


def test_degrees_that_do_not_divide_meet_in_their_least_common_multiple() -> None:
    subgroups = (((0, 1), {0: 2}), ((2, 3, 4), {0: 3}))
    (stage,) = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    groups = [(step.ranks, step.region) for step in stage.steps if isinstance(step, Collective)]
    assert groups == [
        ((0, 2), FULL.cut(0, 0, 3)),
        ((0, 3), FULL.cut(0, 2, 6)),
        ((1, 3), FULL.cut(0, 3, 6)),
        ((1, 4), FULL.cut(0, 2, 3)),
    ]


def test_with_unequal_copies_every_slice_is_reduced_once_and_the_work_is_spread() -> None:
    subgroups = (((0, 1, 2, 3), {0: 4}), ((4, 5, 6, 7), {-1: 4}))
    reduce, hand = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    assert [step.ranks for step in reduce.steps] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert hand.in_place
    assert len(hand.steps) == 12
    assert all(isinstance(step, Transfer) for step in hand.steps)
    assert Counter(step.ranks[0] for step in hand.steps) == {4: 3, 5: 3, 6: 3, 7: 3}


def test_with_equal_copies_each_copy_has_a_group_of_its_own() -> None:
    subgroups = (((0, 1, 2, 3), {-1: 2, 0: 2}), ((4, 5), {-1: 2}))
    (stage,) = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    assert {(step.ranks, step.region) for step in stage.steps if isinstance(step, Collective)} == {
        ((0, 4), FULL.cut(0, 0, 2)),
        ((2, 5), FULL.cut(0, 0, 2)),
        ((1, 4), FULL.cut(0, 1, 2)),
        ((3, 5), FULL.cut(0, 1, 2)),
    }


def test_alike_subgroups_reduce_whole_shards_device_by_device() -> None:
    subgroups = (((0, 1, 2, 3), {0: 2, -1: 2}), ((7, 6, 5, 4), {0: 2, -1: 2}))
    plan = resolve(union(-2, *subgroups), union(1, *subgroups))
    assert plan.label == "RS"
    assert set(plan.stages[0].steps) == {
        Collective("reduce_scatter", pair, FULL.cut(0, index // 2, 2), 1)
        for index, pair in enumerate(((0, 7), (1, 6), (2, 5), (3, 4)))
    }


def test_neighbouring_slices_with_the_same_ranks_are_one_collective() -> None:
    subgroups: tuple[Subgroup, ...] = (((0, 1), {0: 2}), ((2, 3), {-1: 2}), ((4,), {}))
    reduce, _ = resolve(union(-2, *subgroups), union(-1, *subgroups)).stages
    assert [step.ranks for step in reduce.steps] == [(0, 2, 4), (1, 3, 4)]
    wide: tuple[Subgroup, ...] = (((0,), {}), ((1, 2, 3, 4, 5, 6), {-1: 6}), ((7, 8), {1: 2}))
    gather, hand = resolve(union(0, *wide), union(-1, *wide)).stages
    assert [(step.ranks, step.region) for step in gather.steps if isinstance(step, Collective)] == [
        ((0, 1, 7), FULL.cut(1, 0, 2)),
        ((0, 4, 8), FULL.cut(1, 1, 2)),
    ]
    assert len(hand.steps) == 10


@pytest.mark.parametrize("hdims", [(-2, -1), (-2, 1), (1, -1)])
def test_two_split_dims_and_a_shape_that_does_not_divide(hdims: tuple[int, int]) -> None:
    subgroups = (((0, 1, 2, 3), {2: 2, 0: 2}), ((4, 5, 6), {0: 3}), ((7, 8, 9, 10), {-1: 2, 2: 2}))
    src, dst = union(hdims[0], *subgroups), union(hdims[1], *subgroups)
    full = np.arange(7.0 * 5 * 11).reshape(7, 5, 11)
    result = interpret(resolve(src, dst), shard(src, full), full.shape)
    wanted = shard(dst, full)
    assert all(np.array_equal(result[rank], wanted[rank]) for rank in dst.ranks)
