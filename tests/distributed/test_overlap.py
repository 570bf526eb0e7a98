"""Gradients travel behind the backward pass, parameters behind the forward pass (DESIGN §7)."""

from typing import Any

import pytest
import torch

from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

SMALL = 2_000  # elements: every layer of T0 makes several buckets
STEPS = [sequences(4, seed=step) for step in range(3)]
DP2 = ((2, 1, [stage("0", "0-3")]), (2, 1, [stage("1", "0-3")]))


def record(session: Session) -> None:
    """Note when buckets start: names of their parameters, and whether the backward pass was still going on."""
    session.noted = []  # type: ignore[attr-defined]  # a place of the test's own
    sync = session.sync
    start = sync._start

    def noted() -> None:
        inside = torch._C._current_graph_task_id() != -1
        session.noted.append((tuple(sync._names[len(sync._started)]), inside))  # type: ignore[attr-defined]
        start()

    sync._start = noted  # type: ignore[method-assign]


def notes(session: Session) -> Any:
    return session.noted  # type: ignore[attr-defined]


def test_buckets_start_inside_the_last_backward_pass_in_one_order_on_all_ranks() -> None:
    found = train(strategy(*DP2), STEPS[:1], prepare=record, collect=notes, bucket_elements=SMALL)
    first, second = found.extra.values()
    assert first == second
    assert len(first) > 8
    assert all(inside for _, inside in first), "all gradients are complete before the backward pass ends"
    assert "head.weight" in first[0][0]
    assert "embedding.weight" in first[-1][0]


def test_one_large_bucket_waits_for_the_end() -> None:
    found = train(strategy(*DP2), STEPS[:1], prepare=record, collect=notes)
    assert [len(found.extra[rank]) for rank in (0, 1)] == [1, 1]


PLANS = {
    "DP2": strategy(*DP2),
    "HET4": het4(),
    "a pipeline without a micro-batch": strategy(
        (4, 1, [stage("0-1", "0-2"), stage("2", "3")]), (0, 1, [stage("3", "0-3")])
    ),
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_small_buckets_train_the_model_of_one_device(plan: Strategy, zero: int) -> None:
    chosen = strategy(*((p.micro_batches, p.micro_batch_size, p.stages) for p in plan.pipelines), zero=zero)
    assert_parity(train(chosen, STEPS, bucket_elements=SMALL), reference(STEPS))


def test_parameters_arrive_where_the_first_forward_pass_needs_them() -> None:
    """Between two steps the gathers of ZeRO-1 are still on their way; the first forward pass waits for each."""

    def waiting(session: Session, step: int) -> None:
        session.noted = [*getattr(session, "noted", []), len(session.gather._arriving)]  # type: ignore[attr-defined]

    found = train(strategy(*DP2, zero=1), STEPS, before_step=waiting, collect=notes, bucket_elements=SMALL)
    for counts in found.extra.values():
        assert all(count > 8 for count in counts), counts
    assert_parity(found, reference(STEPS))


def test_an_exchange_that_sends_between_ranks_is_not_started_early() -> None:
    """SplitAG with copies ends with a transfer: it is no single collective."""
    found = train(
        het4(zero=1), STEPS[:1], collect=lambda session: _collectives(session), bucket_elements=SMALL
    )
    assert {False, True} == {one for ones in found.extra.values() for one in ones}


def _collectives(session: Session) -> list[bool]:
    exchanges = [route.exchange for route in (*session.sync._routes, *session.gather._routes)]
    return [exchange.is_one_collective for exchange in exchanges if isinstance(exchange, Exchange)]
