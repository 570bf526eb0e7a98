"""Annotation and DeviceGroup: groups, states, hdim; refusals (paper §4)."""

import re
from collections.abc import Callable

import pytest

from hetero_megatron.annotation import FULL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import AnnotationError

ONE = DistributedStates()
TWO = DistributedStates.of({0: 2})


def test_the_top_tier_cuts_first_then_the_bottom_tier() -> None:
    union = Annotation((DeviceGroup((5, 3)), DeviceGroup((4,))), (TWO, ONE), 0)
    assert [union.region(rank) for rank in (5, 3, 4)] == [
        FULL.cut(0, 0, 4),
        FULL.cut(0, 1, 4),
        FULL.cut(0, 1, 2),
    ]
    other = union.replace(hdim=1)
    assert other.region(3).bounds((8, 8)) == ((4, 8), (0, 4))
    assert other.region(4).bounds((8, 8)) == ((0, 8), (4, 8))


def test_duplicate_and_partial_across_subgroups_cut_nothing() -> None:
    union = Annotation((DeviceGroup((0, 1)), DeviceGroup((2,))), (TWO, ONE), -1)
    assert union.subgroup_region(1) == FULL == union.region(2)
    assert not union.has_partial
    assert union.replace(hdim=-2).has_partial
    assert union.replace(states=(DistributedStates.of({-2: 2}), ONE)).has_partial


def test_ranks_subgroups_and_coords_follow_the_groups() -> None:
    union = Annotation((DeviceGroup((5, 3)), DeviceGroup((4,))), (TWO, ONE), -1)
    assert (union.hsize, union.ranks) == (2, (5, 3, 4))
    assert [union.subgroup_of(rank) for rank in (5, 4, 0)] == [0, 1, None]
    assert (union.coord(3), union.coord(4)) == ({0: 1}, {})


def test_equal_annotations_are_one_key_and_device_order_is_meaning() -> None:
    assert Annotation.on((0, 1), {0: 2}) == Annotation((DeviceGroup((0, 1)),), (TWO,))
    assert len({Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {0: 2, 1: 1})}) == 1
    assert Annotation.on((0, 1), {0: 2}) != Annotation.on((1, 0), {0: 2})


def test_one_subgroup_keeps_its_one_spelling_of_hdim() -> None:
    assert Annotation.on((0,)).replace(hdim=0).hdim == -1
    assert str(Annotation.on((0, 1), {-1: 2})) == "(0, 1){duplicate: 2}"
    union = Annotation((DeviceGroup((0,)), DeviceGroup((1,))), (ONE, ONE), -2)
    assert str(union) == "<(0){} | (1){}, hdim -2>"


def test_a_group_is_an_ordered_set_of_ranks() -> None:
    group = DeviceGroup((3, 1))
    assert (len(group), list(group), 1 in group, 0 in group, group.index(1)) == (2, [3, 1], True, False, 1)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: DeviceGroup(()), "device group () is empty: name at least one rank"),
    (lambda: DeviceGroup((1, 2, 1)), "device group (1, 2, 1) names rank 1 twice"),
    (lambda: DeviceGroup((0, -4)), "has a negative rank -4"),
    (lambda: Annotation((DeviceGroup((0,)),), (ONE, ONE)), "1 device groups, but 2 states"),
    (lambda: Annotation((), ()), "0 device groups, but 0 states"),
    (
        lambda: Annotation.on((5, 6), {0: 4}),
        "subgroup 0: states {0: 4} cover 4 devices, group (5, 6) has 2",
    ),
    (
        lambda: Annotation((DeviceGroup((0, 1)), DeviceGroup((1,))), (TWO, ONE), -1),
        "rank 1 is in two subgroups",
    ),
    (
        lambda: Annotation((DeviceGroup((0,)),), (ONE,), 0),
        "one subgroup, but hdim is 0: with HSize 1 it is spelt -1",
    ),
    (
        lambda: Annotation((DeviceGroup((0,)), DeviceGroup((1,))), (ONE, ONE), -3),
        "hdim -3 is neither a tensor dim nor -1 nor -2",
    ),
    (lambda: Annotation.on((0,)).region(7), "rank 7 holds no part of (0){}"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_contradictions_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(AnnotationError, match=re.escape(message)):
        make()
