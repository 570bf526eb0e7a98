"""Counts of micro-batches: fewer than stages, other ones in every pipeline, and ranks that disagree on them."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from hetero_megatron.pipeline import Action, spell_steps
from hetero_megatron.pipeline.plan import plan_schedule
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from tests.cases.stages import one_rank_stages
from tests.distributed.ranks import RanksFailed
from tests.distributed.training import (
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)
STEPS = [D0[0:6], D0[6:12], D0[12:18]]


# Fewer micro-batches than stages (O-32).


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("layers", [("0-1", "2", "3"), ("0", "1", "2", "3")], ids=["3 stages", "4 stages"])
def test_a_pipeline_may_have_fewer_micro_batches_than_stages(
    layers: Sequence[str], micro_batches: int
) -> None:
    plan = strategy((micro_batches, 6, one_rank_stages(*layers)))
    assert_parity(train(plan, STEPS, timeout_s=30), reference(STEPS))


def test_two_pipelines_of_other_depth_may_have_one_micro_batch_each() -> None:
    second = [stage("2", "0-1"), stage("3", "2"), stage("4", "3")]
    plan = strategy((1, 3, one_rank_stages("0-2", "3")), (1, 3, second))
    assert_parity(train(plan, STEPS, timeout_s=30), reference(STEPS))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 9])
def test_a_stage_warms_up_with_as_many_forwards_as_there_are_stages_after_it(
    stages: int, micro_batches: int
) -> None:
    (actions,) = plan_schedule("1f1b", [(stages, micro_batches, 1)]).pipelines
    for number, tasks in enumerate(actions.compute):
        warm_up = min(micro_batches, stages - 1 - number)
        ahead = tasks.index(Action("B", 0))
        assert ahead == min(micro_batches, warm_up + 1), f"stage {number}: {spell_steps(tasks)}"


def test_one_micro_batch_is_one_forward_and_one_backward_on_every_stage() -> None:
    schedule = plan_schedule("1f1b", [(3, 1, 1)])
    assert [spell_steps(tasks) for tasks in schedule.pipelines[0].compute] == ["F0 B0"] * 3
    assert [line.split("|")[1].split() for line in str(schedule).splitlines()[1:]] == [
        ["F0", ".", ".", ".", ".", ".", ".", "B0", "=="],
        [".", "F0", ".", ".", ".", "B0", "==", ".", "."],
        [".", ".", "F0", "B0", "==", ".", ".", ".", "."],
    ]


# Ranks disagree on the number of micro-batches (O-36).

MIXED = (16, 9, 16, 4, 7)


def test_pipelines_may_have_other_counts_of_micro_batches_of_mixed_lengths() -> None:
    steps = [
        tuple(document[:length] for document, length in zip(D0[first : first + 5], MIXED, strict=True))
        for first in (0, 5, 10)
    ]
    # SGD: of so few tokens, some gradients are all rounding, which Adam would blow up a hundredfold.
    found = train(het4((3, 1), (2, 1)), steps, settings=SGD, timeout_s=30)
    assert_parity(found, reference(steps, settings=SGD))


def test_a_stage_that_believes_in_another_count_is_told_before_the_first_send(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def believe(session: Session, _: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        return batches[:2] if session.world.rank == 2 else batches

    def shout(session: Session) -> None:
        communicate = session.stage.communicate

        def shouted(*arguments: Any) -> None:
            print("something is sent", flush=True)
            communicate(*arguments)

        session.stage.communicate = shouted  # type: ignore[method-assign]

    began = time.monotonic()
    with pytest.raises(RanksFailed):
        train(het4((3, 1), (2, 1)), [D0[:5]], batches_of=believe, prepare=shout, timeout_s=30)
    assert time.monotonic() - began < 15
    out, err = capfd.readouterr()
    assert "something is sent" not in out
    told = (
        "error: pipeline 0 disagrees on micro-batches: stage 0 (rank 0) has 3, "
        "stage 1 (rank 2) has 2; nothing was sent\n"
    )
    assert err.count(told) == 3, "every rank of the pipeline says so"
