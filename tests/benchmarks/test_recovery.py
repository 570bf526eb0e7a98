"""The recovery benchmark's reading of logs and its figures."""

import pytest

from benchmarks.recovery import Found, lines, recovery_of

LOG = """ iteration 1/ 100000 | lm loss: 5.5
rank 1 was killed by SIGKILL in the forward pass of iteration 13; noticed by rank 0 (Connection reset); going on with \
ranks 0, 2-3 after iteration 13, in 0.321 s (detect 0.004, agree 0.010, complete 0.000, move 0.307); PP2
"""


def test_a_recovery_is_read_from_the_log() -> None:
    """Iteration 13 was agreed on before the loss: 14 is the first of the new strategy."""
    assert recovery_of("rank 1 was killed") is None
    assert recovery_of(LOG) == (13, {"detect": 0.004, "agree": 0.010, "complete": 0.0, "move": 0.307})


def test_medians_are_compared() -> None:
    told = lines(
        {
            "elastic": [Found(1.0, None, {"detect": 0.1}), Found(3.0, None, {"detect": 0.3}), Found(2.0)],
            "torchrun": [Found(10.0, 9.0, {}, 2)],
        }
    )
    assert told == [
        "elastic, medians of the phases in seconds: detect 0.100",
        "torchrun takes 5.0 times as long as elastic",
    ]
    with pytest.raises(ValueError, match="no median"):
        lines({"elastic": []})
