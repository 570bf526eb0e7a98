"""Joining boxes: neighbours with the same key become one, others stay."""

from fractions import Fraction

from hetero_megatron.annotation import FULL
from hetero_megatron.comm.boxes import join_boxes, numel


def test_a_grid_with_one_key_becomes_one_box() -> None:
    grid = [("a", FULL.cut(0, i, 3).cut(1, j, 2)) for j in range(2) for i in range(3)]
    assert join_boxes(grid) == (("a", FULL),)


def test_other_keys_gaps_and_corners_stay_apart() -> None:
    assert join_boxes([("a", FULL.cut(0, 0, 2)), ("b", FULL.cut(0, 1, 2))]) == (
        ("a", FULL.cut(0, 0, 2)),
        ("b", FULL.cut(0, 1, 2)),
    )
    gap = [("a", FULL.cut(0, i, 3)) for i in (0, 2)]
    assert join_boxes(gap) == tuple(gap)
    corner = [("a", FULL.cut(0, i, 2).cut(1, j, 2)) for i, j in ((0, 0), (0, 1), (1, 1))]
    joined = join_boxes(corner)
    assert len(joined) == 2
    assert sum(region.volume() for _, region in joined) == Fraction(3, 4)


def test_numel_counts_whole_indices() -> None:
    assert [numel(FULL.cut(0, i, 3), (7, 2)) for i in range(3)] == [6, 4, 4]
    assert numel(FULL, ()) == 1
