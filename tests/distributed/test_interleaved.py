"""Interleaved pipelines train exactly the model that one device would (PARITY; paper §6.3, A.2)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hetero_megatron.pipeline.schedule import one_f_one_b
from hetero_megatron.pipeline.schedule_file import read_csv
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Stage, Strategy
from tests.distributed.ranks import RanksFailed
from tests.distributed.training import T0, assert_parity, reference, sequences, stage, strategy, train

SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)
STEPS = [D0[0:4], D0[4:8], D0[8:12]]
SIX = replace(T0, num_layers=6)
PP2 = [stage("0", "0, 2"), stage("1", "1, 3")]


def interleaved(*pipelines: tuple[int, int, Sequence[Stage]]) -> Strategy:
    return strategy(*pipelines, schedule="interleaved")


FOUR_LAYERS = {
    "PP2 v2": interleaved((4, 1, PP2)),
    "PP2 v2, 3 micro-batches": interleaved((3, 2, PP2)),
    "PP2 v2, 1 micro-batch": interleaved((1, 4, PP2)),
    "beside one rank": interleaved((3, 1, PP2), (1, 1, [stage("2", "0-3")])),
    "no micro-batch in one pipeline": interleaved(
        (4, 1, PP2), (0, 1, [stage("2", "0,2"), stage("3", "1,3")])
    ),
    "no micro-batch beside one rank": interleaved((0, 1, PP2), (2, 2, [stage("2", "0-3")])),
    "TP2 > TP1": interleaved((4, 1, [stage("0-1", "0, 2"), stage("2", "1, 3")])),
    "TP1 > TP2": interleaved((3, 2, [stage("0", "0, 2"), stage("1-2", "1, 3")])),
}
SIX_LAYERS = {
    "PP2 v2, unequal chunks": interleaved((4, 1, [stage("0", "0, 2"), stage("1", "1, 3-5")])),
    "PP2 v3": interleaved((3, 2, [stage("0", "0, 2, 4"), stage("1", "1, 3, 5")])),
    "PP3 v2, 4 micro-batches": interleaved(
        (4, 1, [stage("0", "0, 3"), stage("1", "1, 4"), stage("2", "2, 5")])
    ),
    "PP2 v3 beside TP2 PP2 v2": interleaved(
        (2, 1, [stage("0", "0, 2, 4"), stage("1", "1, 3, 5")]),
        (2, 1, [stage("2-3", "0-1, 3"), stage("4", "2, 4-5")]),
    ),
}


@pytest.mark.parametrize("name", FOUR_LAYERS)
def test_three_steps_equal_one_device(name: str) -> None:
    assert_parity(train(FOUR_LAYERS[name], STEPS, settings=SGD), reference(STEPS, settings=SGD))


@pytest.mark.parametrize("name", SIX_LAYERS)
def test_three_steps_of_six_layers_equal_one_device(name: str) -> None:
    assert_parity(train(SIX_LAYERS[name], STEPS, SIX, SGD), reference(STEPS, SIX, SGD))


def test_optimizer_states_are_cut_over_interleaved_pipelines() -> None:
    plan = replace(SIX_LAYERS["PP2 v3 beside TP2 PP2 v2"], zero=1)
    assert_parity(train(plan, STEPS, SIX, SGD), reference(STEPS, SIX, SGD))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_documents_of_any_length_cross_every_chunk(sequence_parallel: bool) -> None:
    """Lengths differ by micro-batch, so a message that took another's place would have another size."""
    steps = [tuple(document[: 16 - 3 * i] for i, document in enumerate(step)) for step in STEPS]
    plan = replace(FOUR_LAYERS["TP2 > TP1"], sequence_parallel=sequence_parallel)
    assert_parity(train(plan, steps, settings=SGD), reference(steps, settings=SGD))


def test_no_two_messages_of_a_step_between_two_ranks_have_one_tag() -> None:
    """Between stages 0 and 1 run the forwards of both chunks and the gradients of both, at the same time."""

    def tags(session: Session) -> list[tuple[int, str]]:
        return sent[session.world.rank]

    sent: dict[int, list[tuple[int, str]]] = {}

    def watch(session: Session, step: int) -> None:
        log = sent[session.world.rank] = []
        for chunk in (*session.stage._inputs, *session.stage._outputs):
            for port in chunk:
                for boundary in filter(None, (port.forward, port.backward)):
                    if "send" not in vars(boundary):
                        wrap(boundary, log)

    def wrap(boundary: object, log: list[tuple[int, str]]) -> None:
        send = boundary.send  # type: ignore[attr-defined]  # a Boundary

        def noted(shard: object, shape: object, tag: int) -> object:
            operations = send(shard, shape, tag)
            log.extend((tag, str(operation.peer)) for operation in operations)
            return operations

        boundary.send = noted  # type: ignore[attr-defined]

    found = train(FOUR_LAYERS["PP2 v2"], STEPS[:1], settings=SGD, before_step=watch, collect=tags)
    assert [len(found.extra[rank]) for rank in (0, 1)] == [4 * 3, 4 * 3]
    assert all(len(set(log)) == len(log) for log in found.extra.values())


def test_an_order_from_a_file_trains_like_one_device() -> None:
    """All forwards chunk by chunk, then all backwards: no schedule of the library has this order."""
    row = "F0,F1,F2,F0.1,F1.1,F2.1,B0.1,B1.1,B2.1,B0,B1,B2"
    tasks = read_csv(f"pipeline,stage,actions\n0,0,{row}\n0,1,{row}\n", "mine.csv")
    plan = strategy((3, 2, PP2), schedule="mine.csv", schedule_tasks=tasks)
    assert_parity(train(plan, STEPS, settings=SGD), reference(STEPS, settings=SGD))


def test_a_step_with_another_count_than_the_file_is_refused_by_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    tasks = (one_f_one_b(2, 2),)
    plan = strategy((2, 2, [stage("0", "0-1"), stage("1", "2-3")]), schedule="mine.csv", schedule_tasks=tasks)
    with pytest.raises(RanksFailed):
        train(plan, STEPS[:1], settings=SGD, batches_of=lambda session, step, batches: batches[:1])
    assert (
        "schedule mine.csv: pipeline 0 runs 2 micro-batches there, and 1 in this step"
        in capfd.readouterr().err
    )
