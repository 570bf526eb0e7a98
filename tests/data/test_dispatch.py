"""Dealing rows to pipelines (cases O-33, O-50: last micro-batch smaller, none empty)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_megatron.data.dispatch import deal
from hetero_megatron.errors import DataError


def sizes(global_batch_size: int, *pipelines: tuple[int, int]) -> list[list[int]]:
    return [[len(rows) for rows in pipeline] for pipeline in deal(global_batch_size, pipelines)]


def test_eight_rows_in_three_micro_batches_are_three_three_two() -> None:
    assert deal(8, [(3, 3)]) == (((0, 1, 2), (3, 4, 5), (6, 7)),)


def test_five_rows_at_size_two_and_one_row() -> None:
    assert sizes(5, (3, 2)) == [[2, 2, 1]]
    assert sizes(1, (1, 2)) == [[1]]


def test_the_papers_uneven_counts_take_their_rows() -> None:
    first, second = deal(64, [(33, 1), (31, 1)])
    assert [rows[0] for rows in first] == list(range(33))
    assert [rows[0] for rows in second] == list(range(33, 64))
    assert sizes(64, (16, 2), (16, 2)) == [[2] * 16] * 2


def test_left_over_rows_are_spread_over_the_pipelines() -> None:
    assert sizes(6, (2, 2), (2, 2)) == [[2, 1], [2, 1]]
    assert sizes(5, (2, 2), (2, 2)) == [[2, 1], [1, 1]]


def test_small_micro_batches_leave_their_share_to_large_ones() -> None:
    assert sizes(9, (2, 1), (2, 4)) == [[1, 1], [4, 3]]


def test_a_pipeline_without_micro_batches_gets_nothing() -> None:
    assert sizes(2, (0, 1), (2, 1)) == [[], [1, 1]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4), st.integers(1, 100))
def test_every_row_is_dealt_once_in_order_and_within_the_limits(
    pipelines: list[tuple[int, int]], rows: int
) -> None:
    try:
        dealt = deal(rows, pipelines)
    except DataError:
        count = sum(micro_batches for micro_batches, _ in pipelines)
        assert not count <= rows <= sum(micro_batches * size for micro_batches, size in pipelines)
        return
    assert [row for pipeline in dealt for micro_batch in pipeline for row in micro_batch] == list(range(rows))
    for (micro_batches, size), pipeline in zip(pipelines, dealt, strict=True):
        own = [len(micro_batch) for micro_batch in pipeline]
        assert len(own) == micro_batches
        assert own == sorted(own, reverse=True)
        assert not own or (min(own) >= 1 and max(own) <= size and max(own) - min(own) <= 1)


def test_too_many_rows_are_refused_with_the_sum() -> None:
    with pytest.raises(
        DataError, match=r"global_batch_size 9 does not fit: .* 2 x 2 \+ 4 x 1 = 8 rows a step"
    ):
        deal(9, [(2, 2), (4, 1)])


def test_an_empty_micro_batch_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"global_batch_size 5 leaves micro-batches empty: the pipelines run 6"
    ):
        deal(5, [(2, 2), (4, 1)])


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="global_batch_size is 0; a step needs 1 row or more"):
        deal(0, [(1, 1)])
