"""Region: exact boxes and their integer bounds (paper §4)."""

import re
from fractions import Fraction
from itertools import pairwise

import pytest

from hetero_megatron.annotation import FULL, Region
from hetero_megatron.errors import AnnotationError


def test_edges_round_up_so_that_any_mixture_of_degrees_tiles_exactly() -> None:
    for parts in (2, 3, 4, 6, 97, 120):
        edges = [FULL.cut(0, index, parts).bounds((97, 4))[0] for index in range(parts)]
        assert edges[0][0] == 0
        assert edges[-1][1] == 97
        assert all(left[1] == right[0] for left, right in pairwise(edges))
    assert FULL.cut(0, 1, 2).bounds((97, 4)) == ((49, 97), (0, 4))
    assert FULL.cut(1, 2, 3).bounds((5, 1)) == ((0, 5), (1, 1))


def test_one_part_of_the_tensor_has_one_spelling() -> None:
    assert FULL.cut(0, 0, 1) == FULL
    assert FULL.cut(0, 1, 2).cut(0, 1, 2) == FULL.cut(0, 3, 4)
    assert FULL.cut(1, 0, 2).cut(0, 0, 2) == FULL.cut(0, 0, 2).cut(1, 0, 2)
    assert FULL.cut(0, 1, 2).with_span(0, Fraction(0), Fraction(1)) == FULL


def test_intersection_containment_and_volume() -> None:
    left, right, rows = FULL.cut(0, 0, 2), FULL.cut(0, 1, 2), FULL.cut(1, 0, 3)
    assert left.intersect(right) is None
    assert left.intersect(rows) == left.cut(1, 0, 3)
    assert left.intersect(FULL.cut(0, 0, 3)) == FULL.cut(0, 0, 3)
    assert FULL.contains(left)
    assert not left.contains(FULL)
    assert left.contains(FULL.cut(0, 1, 4))
    assert not left.contains(FULL.cut(0, 1, 3))
    assert (FULL.volume(), left.cut(1, 0, 3).volume()) == (Fraction(1), Fraction(1, 6))


def test_a_region_is_exact_when_every_edge_is_a_whole_index() -> None:
    assert FULL.cut(0, 1, 3).exact((9, 5))
    assert not FULL.cut(0, 1, 3).exact((10, 5))
    assert (str(FULL), str(FULL.cut(0, 1, 3))) == ("[whole]", "[dim 0: 1/3..2/3]")


@pytest.mark.parametrize(
    ("dim", "lo", "hi"),
    [(0, Fraction(1, 2), Fraction(1, 2)), (-1, Fraction(0), Fraction(1, 2)), (0, Fraction(0), Fraction(2))],
)
def test_what_is_no_part_of_a_tensor_is_refused(dim: int, lo: Fraction, hi: Fraction) -> None:
    with pytest.raises(
        AnnotationError, match=re.escape(f"region of dim {dim}: [{lo}, {hi}) is not a part of [0, 1)")
    ):
        Region.of({dim: (lo, hi)})


def test_a_shape_with_too_few_dims_is_refused() -> None:
    with pytest.raises(AnnotationError, match=re.escape("cuts dim 1, but shape (4,) has 1 dims")):
        FULL.cut(1, 0, 2).bounds((4,))
