"""How ranks are written for people to read."""

import pytest

from hetero_megatron.report import rank_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((4,), "R4"),
        ((0, 1), "R0-1"),
        ((0, 1, 2, 3), "R0-3"),
        ((0, 4, 8), "R0,4,8"),
        ((15, 40, 41, 42, 43), "R15,40-43"),
        ((0, 1, 4), "R0,1,4"),
        ((3, 2, 1), "R3,2,1"),
    ],
)
def test_runs_of_ranks_have_a_dash_and_the_order_stays(ranks: tuple[int, ...], text: str) -> None:
    assert rank_text(ranks) == text
