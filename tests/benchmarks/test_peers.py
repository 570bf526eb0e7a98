"""Both sides of the peers benchmark train the same model; a side that does not is noticed."""

import pytest

from benchmarks.peers.case import LAYOUTS, Case, Layout
from benchmarks.peers.rounds import LossesDiffer, check_losses, measure
from hetero_megatron.models.config import LlamaConfig

TINY = Case(LlamaConfig(2, 16, 24, 2, 2, 64), sequence=8, micro_batches=8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ours_and_pytorchs_own_stack_have_the_same_losses(name: str) -> None:
    layout = LAYOUTS[name]
    measured = measure(TINY, layout, rounds=1, steps=2, sequence_parallel=False, gemm_seconds=0.01)
    assert len(measured.losses) == 4
    assert measured.losses[-1][0] < measured.losses[0][0], "the weights are updated"
    assert all(
        len(measured.seconds[side]) == 1 and measured.seconds[side][0] > 0 for side in measured.seconds
    )


def test_ours_under_sequence_parallelism_has_the_same_losses() -> None:
    measure(TINY, LAYOUTS["TP2"], rounds=1, steps=1, sequence_parallel=True, gemm_seconds=0.01)


def test_losses_that_differ_in_the_fifth_digit_are_refused() -> None:
    check_losses(Layout("TP2", tp=2), [(8.31234, 8.31238)])
    with pytest.raises(
        LossesDiffer, match=r"TP2, step 1: our loss is 8\.3124000, theirs 8\.3123000; they must be equal"
    ):
        check_losses(Layout("TP2", tp=2), [(8.3, 8.3), (8.3124, 8.3123)])
    with pytest.raises(LossesDiffer, match="our loss is nan"):
        check_losses(Layout("TP2", tp=2), [(float("nan"), 8.3123)])
