"""When gradients are reduced at the end of a step."""

import pytest

from hetero_megatron.planner.segments import Segment, finish, reductions

BOTH = ((0, 0), (1, 0))


def segment(
    layers: int,
    reduce: float,
    pieces: int = 1,
    early: bool = False,
    members: tuple[tuple[int, int], ...] = BOTH,
) -> Segment:
    return Segment(members, layers, reduce, 0.0, pieces, True, early)


def test_one_bucket_begins_when_the_last_backward_of_the_slowest_replica_ends() -> None:
    (only,) = reductions([segment(4, 1.0)], [(10.0,), (7.0,)], [(2.0,), (2.0,)])
    assert only[1:] == (10.0, 11.0)


def test_buckets_begin_inside_the_last_backward_and_the_last_one_is_left_over() -> None:
    """Four layers in 2 s: the first bucket is complete after half a second, and a quarter of the work is exposed."""
    (only,) = reductions([segment(4, 1.0, pieces=4)], [(10.0,), (10.0,)], [(2.0,), (2.0,)])
    assert only[1:] == (pytest.approx(8.5), pytest.approx(10.25))
    (slow,) = reductions([segment(4, 8.0, pieces=4)], [(10.0,), (10.0,)], [(2.0,), (2.0,)])
    assert slow[2] == pytest.approx(16.5), "where the network is slower than the backward"


def test_segments_follow_each_other_from_the_last_layer_to_the_first() -> None:
    found = reductions([segment(2, 1.0), segment(2, 1.0)], [(10.0,), (10.0,)], [(2.0,), (2.0,)])
    assert [(begin, over) for _, begin, over in found] == [(9.0, 10.0), (10.0, 11.0)]


def test_the_heads_gradients_are_there_first_and_the_embeddings_last() -> None:
    parts = [segment(0, 1.0), segment(4, 1.0), segment(0, 0.5, early=True)]
    found = reductions(parts, [(10.0,), (10.0,)], [(2.0,), (2.0,)])
    assert [begin for _, begin, _ in found] == [8.0, 10.0, 11.0]


def test_a_stage_that_two_segments_share_with_others_waits_for_both() -> None:
    parts = [segment(2, 1.0, members=((0, 0), (1, 0))), segment(2, 1.0, members=((0, 0), (1, 1)))]
    ends = [(5.0,), (5.0, 9.0)]
    found = reductions(parts, ends, [(1.0,), (1.0, 1.0)])
    assert [(begin, over) for _, begin, over in found] == [(9.0, 10.0), (10.0, 11.0)]
    assert finish(found, ends) == [[11.0], [11.0, 10.0]]
