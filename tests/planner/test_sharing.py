"""A step over unlike pipelines: whole, within capacities, near a bound that is one (cases O-43, O-72)."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.pipeline_work import PipelineWork
from hetero_megatron.planner.sharing import Sharing, SharingLane, share


def work(
    per_token: float, depth: int = 1, constant: float = 0.0, per_pair: float = 0.0, longest: int = 64
) -> PipelineWork:
    grid = np.arange(1, longest + 1, dtype=np.float64)
    return PipelineWork(depth, constant, grid, per_token + per_pair * grid, per_token, per_pair)


def documents(found: Sharing) -> list[int]:
    return sorted(each for own in found.pipelines for batch in own for each in batch)


def counts(found: Sharing) -> list[int]:
    return [sum(len(batch) for batch in own) for own in found.pipelines]


def test_64_equal_documents_over_3_equal_pipelines_are_22_21_21() -> None:
    found = share([5] * 64, [SharingLane(work(1.0), 5)] * 3)
    assert sorted(counts(found)) == [21, 21, 22]
    assert documents(found) == list(range(64))
    assert max(found.seconds) == 110
    assert found.lower_bound <= 110


def test_64_equal_documents_over_speeds_33_to_31_are_33_and_31() -> None:
    lanes = [SharingLane(work(1 / 33), 4), SharingLane(work(1 / 31), 4)]
    assert counts(share([4] * 64, lanes)) == [33, 31]


def test_2_documents_over_3_pipelines_leave_one_without_work() -> None:
    found = share([7, 7], [SharingLane(work(1.0), 8)] * 3)
    assert sorted(counts(found)) == [0, 1, 1]


def test_no_pipeline_is_refused_and_no_document_is_no_work() -> None:
    with pytest.raises(
        PlannerError, match="there is no pipeline to share documents over; a strategy has at least"
    ):
        share([3], [])
    assert share([], [SharingLane(work(1.0), 8)] * 2) == Sharing(((), ()), (0.0, 0.0), 0.0)


def test_a_document_without_tokens_is_refused() -> None:
    with pytest.raises(PlannerError, match="document 1 has 0 tokens; lengths are positive"):
        share([3, 0], [SharingLane(work(1.0), 8)])


def test_a_document_goes_where_it_fits_after_it_is_filled_up() -> None:
    lanes = [SharingLane(work(0.01), 64, 12, 16), SharingLane(work(1.0), 64)]
    placed = [counts(share([length], lanes)).index(1) for length in (12, 13, 16, 17, 32)]
    assert placed == [0, 1, 1, 1, 1]


def test_a_document_that_fits_nowhere_is_refused_with_what_fits() -> None:
    lanes = [SharingLane(work(1.0), 16, 12), SharingLane(work(1.0), 32)]
    with pytest.raises(
        PlannerError,
        match=r"document 1 has 33 tokens and fits into no pipeline; the longest that do have 12 in pipeline 0 \(filled "
        r"up to a multiple of 12\), 32 in pipeline 1; take a strategy for longer",
    ):
        share([3, 33], lanes)


def test_lone_stages_get_few_full_micro_batches_and_deep_ones_many() -> None:
    lengths = [8] * 32
    shallow = share(lengths, [SharingLane(work(1.0, constant=1.0), 64)])
    deep = share(lengths, [SharingLane(work(1.0, 4, constant=1.0), 64)])
    assert len(shallow.pipelines[0]) == 4
    assert len(deep.pipelines[0]) > 8
    assert deep.seconds[0] == pytest.approx(256 + 32 + 3 * 9)


LANES = st.builds(
    lambda rate, depth, constant, pair, capacity, multiple: SharingLane(
        work(rate, depth, constant, pair), max(capacity, multiple), multiple
    ),
    st.floats(0.1, 2.0),
    st.integers(1, 3),
    st.floats(0.0, 3.0),
    st.floats(0.0, 0.1),
    st.integers(8, 40),
    st.integers(1, 4),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=40), st.lists(LANES, min_size=1, max_size=4))
def test_everything_is_shared_once_within_capacity_and_not_below_the_bound(
    lengths: list[int], lanes: list[SharingLane]
) -> None:
    lanes = [*lanes, SharingLane(work(1.0), 24)]
    found = share(lengths, lanes)
    assert documents(found) == list(range(len(lengths)))
    for lane, own, seconds in zip(lanes, found.pipelines, found.seconds, strict=True):
        for batch in own:
            assert sum(lengths[each] for each in batch) <= lane.room
            assert all(lengths[each] <= lane.reach for each in batch)
        assert seconds == pytest.approx(taken(lane, own, lengths))
    assert max(found.seconds) >= found.lower_bound * (1 - 1e-9)
    assert found == share(lengths, lanes)


def taken(lane: SharingLane, own: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    each = [lane.work.alone(np.array([lengths[n] for n in batch])).sum() for batch in own]
    return lane.work.seconds(sum(each), len(each), max(each)) if each else 0.0


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_below_the_best_of_all_sharings_and_the_sharing_near_it(seed: int) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 25, 7).tolist()
    lanes = [
        SharingLane(
            work(random.uniform(0.5, 2), per_pair=random.uniform(0, 0.05)), int(random.choice([24, 64]))
        )
        for _ in range(3)
    ]

    def slowest(owners: tuple[int, ...]) -> float:
        own: list[list[int]] = [[], [], []]
        for length, owner in zip(lengths, owners, strict=True):
            own[owner].append(length)
        return max(
            float(lane.work.alone(np.array(each, dtype=np.int64)).sum())
            for lane, each in zip(lanes, own, strict=True)
        )

    best = min(
        slowest(owners)
        for owners in product(range(3), repeat=7)
        if all(lanes[owner].reach >= n for n, owner in zip(lengths, owners, strict=True))
    )
    found = share(lengths, lanes)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert max(found.seconds) <= 1.15 * best


def test_many_short_documents_come_within_one_percent_of_the_bound() -> None:
    random = np.random.RandomState(3)
    lengths = random.randint(1, 33, 400).tolist()
    lanes = [SharingLane(work(0.7, per_pair=0.01), 64), SharingLane(work(1.1, per_pair=0.005), 64)]
    found = share(lengths, [*lanes, lanes[0]])
    assert max(found.seconds) <= 1.01 * found.lower_bound
