"""DistributedStates: device index to coords, regions, refusals (paper §4.1)."""

import re
from fractions import Fraction

import pytest

from hetero_megatron.annotation import FULL, DistributedStates, Region
from hetero_megatron.errors import AnnotationError

# states, coords of devices 0..3
VECTORS = [
    ({0: 2, 1: 2}, [{0: 0, 1: 0}, {0: 0, 1: 1}, {0: 1, 1: 0}, {0: 1, 1: 1}]),
    ({1: 2, 0: 2}, [{0: 0, 1: 0}, {0: 1, 1: 0}, {0: 0, 1: 1}, {0: 1, 1: 1}]),
    ({-1: 2, 0: 2}, [{-1: 0, 0: 0}, {-1: 0, 0: 1}, {-1: 1, 0: 0}, {-1: 1, 0: 1}]),
    ({0: 2, -1: 2}, [{0: 0, -1: 0}, {0: 0, -1: 1}, {0: 1, -1: 0}, {0: 1, -1: 1}]),
    ({0: 2, -2: 2}, [{0: 0, -2: 0}, {0: 0, -2: 1}, {0: 1, -2: 0}, {0: 1, -2: 1}]),
]


@pytest.mark.parametrize(("parts", "coords"), VECTORS)
def test_the_last_dim_of_the_order_varies_fastest(
    parts: dict[int, int], coords: list[dict[int, int]]
) -> None:
    states = DistributedStates.of(parts)
    assert [states.coord(index) for index in range(4)] == coords


@pytest.mark.parametrize(
    ("parts", "shards"),
    [
        ({0: 2, 1: 2}, [0, 1, 2, 3]),
        ({1: 2, 0: 2}, [0, 2, 1, 3]),
        ({-1: 2, 0: 2}, [0, 1, 0, 1]),
        ({0: 2, -1: 2}, [0, 0, 1, 1]),
        ({-2: 2, 0: 2}, [0, 1, 0, 1]),
    ],
)
def test_the_region_is_the_shard_whatever_the_copies_and_addends(
    parts: dict[int, int], shards: list[int]
) -> None:
    states = DistributedStates.of(parts)
    regions = sorted({states.region(index) for index in range(4)}, key=lambda region: region.bounds((8, 8)))
    assert [regions.index(states.region(index)) for index in range(4)] == shards


def test_dims_with_one_part_are_dropped_and_missing_dims_have_one() -> None:
    states = DistributedStates.of({0: 1, 1: 3, -1: 1})
    assert states == DistributedStates(((1, 3),))
    assert (states.degree, states.parts(0), states.parts(1), states.split_dims) == (3, 1, 3, (1,))
    assert str(states.with_parts({-2: 2, 1: 1})) == "{partial: 2}"
    assert DistributedStates().region(0) is FULL


def test_regions_nest_in_what_the_subgroup_holds() -> None:
    inside = FULL.cut(0, 1, 2)
    assert DistributedStates.of({0: 2}).region(0, inside) == Region.of({0: (Fraction(1, 2), Fraction(3, 4))})


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (((0, 2), (0, 3)), "list a dim twice"),
        (((-3, 2),), "dim -3 is neither a tensor dim nor -1 nor -2"),
        (((0, 1),), "dim 0 has 1 parts; list a dim only when it has 2 or more"),
    ],
)
def test_contradicting_states_are_refused(order: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(AnnotationError, match=re.escape(message)):
        DistributedStates(order)


def test_a_device_index_outside_the_states_is_refused() -> None:
    with pytest.raises(AnnotationError, match="cover 2 devices, there is no device index 2"):
        DistributedStates.of({0: 2}).coord(2)
