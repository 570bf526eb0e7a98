"""The comparison of predicted and measured steps: what it runs, and its arithmetic."""

from dataclasses import replace

import pytest

from benchmarks.simulator import (
    CONFIG,
    SEQUENCE,
    SLOW,
    TINY,
    TINY_SEQUENCE,
    Run,
    cluster_of,
    paced_profile,
    predict,
    rank_correlation,
    runs,
    with_slow_kind,
)
from hetero_megatron.planner.profiles import Measurement, Profiles

PROFILE = Profiles(
    measurements=tuple(
        Measurement("cpu", "fp32", unit, phase, 1, 1, SEQUENCE, SEQUENCE, seconds)  # type: ignore[arg-type]
        for unit, seconds in (("layer", 1e-2), ("embedding", 1e-4), ("head", 1e-2))
        for phase in ("forward", "backward")
    )
)


def test_more_than_twenty_strategies_fit_the_model_and_two_or_four_ranks() -> None:
    assert len(runs(2)) >= 20
    assert len(runs(4)) > len(runs(2))
    for ranks in (2, 4):
        names = [run.name for run in runs(ranks)]
        assert len(set(names)) == len(names)
        for run in runs(ranks):
            run.strategy.check(CONFIG.facts, cluster_of(run).ranks)
            assert max(run.strategy.ranks) < ranks
    assert sum(bool(run.slow) for run in runs(2)) >= 6


def test_slowed_ranks_are_predicted_to_be_slower() -> None:
    run = next(run for run in runs(2) if run.name == "pp2 4/4, rank 0 slow")
    assert cluster_of(run).kind(0).name == SLOW
    slow, even = (predict(each, with_slow_kind(PROFILE, 3.0)) for each in (run, replace(run, slow=())))
    assert 1.8 * even < slow < 3 * even
    unequal = next(run for run in runs(2) if run.name == "pp2 2/6, rank 0 slow")
    assert predict(unequal, with_slow_kind(PROFILE, 3.0)) < slow


def test_paced_passes_are_priced_at_their_pace() -> None:
    """Two stages of 4 layers: (8 + 1) slots of 4 layers' forward and backward."""
    run = next(run for run in runs(2) if run.name == "pp2 4/4")
    found = predict(run, paced_profile(0.01), TINY, TINY_SEQUENCE)
    assert found == pytest.approx(9 * 4 * 0.03, rel=0.02)


def test_rank_correlation_is_that_of_places() -> None:
    assert rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)


def test_a_run_is_named() -> None:
    assert all(isinstance(run, Run) and run.name for run in runs(2))
