"""Steps drawn from length statistics: full, by seed, within the context."""

import numpy as np
import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.length_sample import LengthSample, borders
from tests.planner.lengths import wikipedia_like


def test_lengths_of_the_project_have_the_published_quantiles() -> None:
    lengths = wikipedia_like(100_000)
    assert np.percentile(lengths, (50, 90, 99)).tolist() == pytest.approx([347, 2112, 10919], rel=0.01)


def test_steps_are_full_within_the_context_and_the_same_for_a_seed() -> None:
    sample = LengthSample.draw(wikipedia_like(), 16384, 200_000, 20, 5)
    assert len(sample.steps) == 20
    for step in sample.steps:
        assert 200_000 - 16384 < step.sum() <= 200_000
        assert step.max() <= 16384
    again = LengthSample.draw(wikipedia_like(), 16384, 200_000, 20, 5)
    assert all((a == b).all() for a, b in zip(sample.steps, again.steps, strict=True))
    long = sample.up_to(8192, 16384, 3)
    assert 0 < len(long) <= 3
    assert all(8192 < step.max() <= 16384 for step in long)


def test_borders_are_two_per_doubling_and_end_with_the_context() -> None:
    assert borders(4096) == (512, 768, 1024, 1536, 2048, 3072, 4096)


@pytest.mark.parametrize(
    ("lengths", "sizes", "text"),
    [
        ([], (16, 64, 2), "there is none; give lengths of 1 or more"),
        ([3, 0], (16, 64, 2), "one has 0 tokens; give lengths of 1 or more"),
        ([3], (16, 64, 0), "context 16, 64 tokens per step and 0 steps must be positive"),
        ([3], (65, 64, 2), "a step of 64 tokens does not hold a document of the context's 65"),
    ],
)
def test_what_gives_no_steps_is_refused(lengths: list[int], sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(PlannerError, match=text):
        LengthSample.draw(np.array(lengths, dtype=np.int64), *sizes)
