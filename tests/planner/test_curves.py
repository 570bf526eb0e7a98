"""Fitted times."""

import numpy as np
import pytest

from hetero_megatron.planner.curves import Curve, Point, fit, positive

PRIOR = Curve(0.0, 2e-6, 1e-9)


def test_coefficients_are_found_where_lengths_and_sizes_vary() -> None:
    def took(tokens: int, length: int) -> float:
        return 1e-3 + 3e-6 * tokens + 2e-9 * Point(tokens, length, 0).pairs

    sizes = [(t, s) for t in (1024, 2048, 4096) for s in (256, 512, 1024)]
    found = fit([Point(t, s, took(t, s)) for t, s in sizes], PRIOR)
    assert (found.constant, found.per_token, found.per_pair) == pytest.approx((1e-3, 3e-6, 2e-9), rel=1e-6)
    assert found.seconds(3000, 3000 * 700) == pytest.approx(1e-3 + 9e-3 + 2e-9 * 2.1e6)


def test_one_size_scales_the_prior() -> None:
    found = fit([Point(1000, 500, 3 * PRIOR.seconds(1000, 500_000))], PRIOR)
    assert found.per_token == pytest.approx(3 * PRIOR.per_token)
    assert found.per_pair == pytest.approx(3 * PRIOR.per_pair)


def test_one_document_length_keeps_the_priors_proportion_of_tokens_and_pairs() -> None:
    points = [Point(t, 512, 1e-4 + 2 * PRIOR.seconds(t, t * 512)) for t in (512, 1024, 2048)]
    found = fit(points, PRIOR)
    assert found.constant == pytest.approx(1e-4)
    assert found.per_pair / found.per_token == pytest.approx(PRIOR.per_pair / PRIOR.per_token)


def test_no_coefficient_is_negative() -> None:
    falling = [Point(t, 64, s) for t, s in ((64, 2e-3), (128, 2e-3), (256, 2.1e-3))]
    found = fit(falling, PRIOR)
    assert min(found.constant, found.per_token, found.per_pair) >= 0
    assert (positive(np.array([[1.0, -1.0]])) >= 0).all()


def test_measured_sizes_take_what_was_measured_and_between_them_what_lies_on_the_line() -> None:
    found = fit([Point(100, 50, 1.0), Point(200, 50, 4.0), Point(200, 50, 6.0)], PRIOR)
    assert found.seconds(100, 5000) == 1.0
    assert found.seconds(200, 10_000) == 5.0, "the median of what was measured twice"
    assert found.seconds(150, 7500) == pytest.approx(3.0)


def test_a_size_that_took_longer_than_a_larger_one_takes_what_the_larger_one_took() -> None:
    found = fit([Point(100, 50, 3.0), Point(200, 50, 2.0), Point(400, 50, 4.0)], PRIOR)
    assert found.seconds(100, 5000) == 2.0


def test_beyond_what_was_measured_there_is_a_reason_to_warn() -> None:
    found = fit([Point(100, 50, 1.0), Point(200, 100, 2.0)], PRIOR)
    assert found.outside(150, 60) is None
    assert found.outside(400, 60) == "400 tokens, measured 100 to 200"
    assert found.outside(150, 120) == "documents of 120 tokens, measured 50 to 100"
    assert PRIOR.outside(10**9, 1) is None, "published figures have no range"


def test_nothing_takes_no_time() -> None:
    assert Curve(1.0, 1.0, 1.0).seconds(0, 0) == 0.0


def test_a_scaled_curve_keeps_its_range() -> None:
    found = fit([Point(100, 50, 1.0), Point(200, 50, 4.0)], PRIOR).scaled(2.0)
    assert found.seconds(100, 5000) == 2.0
    assert found.outside(99, 50)
