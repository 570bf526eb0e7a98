"""Saved and loaded under other layouts: norms, tied embeddings, uneven pieces, moments (O-27, O-29, O-31, O-56)."""

import dataclasses
from pathlib import Path

import pytest

from hetero_megatron.strategy import Strategy
from tests.distributed.courses import assert_as_if_never_stopped, go_on, run_course
from tests.distributed.training import T0, het3, het4, sequences, stage, strategy

ONE = strategy((1, 6, [stage("0", "0-3")]))
TIED = dataclasses.replace(T0, tie_word_embeddings=True)


def replicas(count: int) -> Strategy:
    return strategy(*((1, 6 // count, [stage(str(rank), "0-3")]) for rank in range(count)), zero=1)


@pytest.mark.parametrize(
    "plan", [strategy((1, 6, [stage("0-1", "0-3")])), het4((2, 2), (1, 2))], ids=["TP2", "HET4"]
)
def test_norm_copies_stay_equal_through_a_file(plan: Strategy, tmp_path: Path) -> None:
    """O-27, the file half: odd masks make the tokens of the two ranks differ; copies are compared by `go_on`."""
    steps = [sequences(6, seed=step) for step in range(6)]
    masks = {document: (1, 2, 5) for documents in steps for document in documents[::2]}
    course = run_course(plan, steps, 5, tmp_path, masks=masks)
    found = go_on(course, plan, masks=masks)
    assert found.losses == course.rest.losses


@pytest.mark.parametrize(
    "plan",
    [ONE, strategy((3, 2, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")]))],
    ids=["1 stage", "3 uneven stages"],
)
def test_a_tied_model_has_the_same_loss_after_loading(plan: Strategy, tmp_path: Path) -> None:
    """O-29: the loss of the fourth batch, before and after, on the same layout and on the other one."""
    steps = [sequences(6, seed=step) for step in range(4)]
    course = run_course(plan, steps, 3, tmp_path, TIED)
    assert [name for name in course.outcome.tensors if name.startswith(("head", "embedding"))] == [
        "embedding.weight"
    ]
    again = go_on(course, plan)
    assert abs(again.losses[0] - course.rest.losses[0]) < 1e-7
    assert_as_if_never_stopped(course, het3())


def test_one_huge_tensor_in_uneven_pieces_goes_to_any_number_of_ranks(tmp_path: Path) -> None:
    """O-31: ZeRO-1 on two ranks, then on two, three and one, and on four unequal ones without ZeRO."""
    config = dataclasses.replace(T0, vocab_size=2000)
    steps = [sequences(6, vocab=2000, seed=step) for step in range(4)]
    course = run_course(replicas(2), steps, 2, tmp_path, config, asynchronous=False)
    for plan in (replicas(2), replicas(3), replicas(1), het4((2, 2), (1, 2))):
        assert_as_if_never_stopped(course, plan)


def test_moments_survive_a_change_of_layout(tmp_path: Path) -> None:
    """O-56, through a file: a moment that was reset would change a weight by about the learning rate, 1e-2."""
    steps = [sequences(6, seed=step) for step in range(6)]
    course = run_course(
        strategy((3, 2, [stage("0-1", "0-1"), stage("2-3", "2-3")])), steps, 5, tmp_path, asynchronous=False
    )
    assert_as_if_never_stopped(course, het3())
