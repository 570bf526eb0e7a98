"""Length intervals and layouts by dynamic programming: equal to trying everything on small inputs (paper A.1, c)."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from hetero_megatron.planner.intervals import Loads, Option, best_of
from hetero_megatron.planner.layouts import Layout
from tests.planner.test_sharing import work


def cuts(count: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut [0, count) into consecutive intervals."""
    for size in range(count):
        for inner in combinations(range(1, count), size):
            ends = [0, *inner, count]
            yield list(pairwise(ends))


def exhaustive(loads: Loads, options: Sequence[Option], devices: int) -> float:
    best = float("inf")
    for intervals in cuts(len(loads.ends)):
        for chosen in product(options, repeat=len(intervals)):
            if any(o.capacity < loads.ends[end - 1] for o, (_, end) in zip(chosen, intervals, strict=True)):
                continue
            for numbers in product(range(1, devices + 1), repeat=len(intervals)):
                used = sum(n * o.layout.devices for n, o in zip(numbers, chosen, strict=True))
                if used <= devices:
                    seconds = max(
                        loads.seconds(o, n, *interval)
                        for o, n, interval in zip(chosen, numbers, intervals, strict=True)
                    )
                    best = min(best, seconds)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_programme_finds_what_trying_everything_finds(seed: int) -> None:
    random = np.random.RandomState(seed)
    steps = [np.minimum(np.ceil(random.lognormal(2.2, 1.0, 20)), 64).astype(np.int64) for _ in range(3)]
    options = [
        Option(Layout(1, 1, 1), work(random.uniform(0.8, 1.2), constant=0.5), 16),
        Option(Layout(2, 1, 1), work(random.uniform(0.5, 0.7), constant=0.5), 32),
        Option(Layout(2, 1, 2), work(random.uniform(0.2, 0.4), 2, 0.2), 64),
        Option(Layout(4, 1, 1), work(random.uniform(0.2, 0.45), constant=0.5), 64),
    ]
    loads = Loads(steps, (8, 16, 32, 64))
    found = best_of(loads, options, 6)
    assert found[0][0] == pytest.approx(exhaustive(loads, options, 6))
    assert list(found) == sorted(found)
    assert found == best_of(loads, options, 6)
    for _, composition in found:
        assert sum(count * layout.devices for layout, count in composition) <= 6


def test_the_long_interval_gets_a_layout_that_holds_it() -> None:
    options = [Option(Layout(1, 1, 1), work(1.0), 16), Option(Layout(4, 1, 1), work(0.5), 64)]
    loads = Loads([np.array([4] * 40 + [60])], (16, 64))
    (_, best), *_ = best_of(loads, options, 8)
    assert dict(best)[Layout(4, 1, 1)] >= 1
    assert best_of(loads, options[:1], 8) == ()
