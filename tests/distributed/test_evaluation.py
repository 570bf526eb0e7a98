"""Evaluation is the loss of one device on the same documents, and training never notices it (cases O-29, O-50)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import GraphError, RuntimeFailure
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.runtime.batch import IGNORE, MicroBatch
from hetero_megatron.runtime.session import Evaluation, Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Recompute, Strategy
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    ADAM,
    LOSS_RTOL,
    T0,
    Document,
    assemble,
    build,
    het3,
    het4,
    micro_batch,
    sequences,
    snapshot,
    stage,
    start,
    strategy,
)
from tests.runtime.test_session import left_over

D0 = sequences(24)
# Five samples of which one is short and one predicts little: a mean of means would be another number.
HELD_OUT: tuple[Document, ...] = (D0[10], D0[11][:3], D0[12], D0[13][:9], D0[14])
TIED = replace(T0, tie_word_embeddings=True)

MEMORY = (Recompute("full", (0, 0)), Recompute("selective", (1, 1)))
LAYOUTS: dict[str, tuple[Strategy, LlamaConfig]] = {
    "TP2": (strategy((2, 1, [stage("0-1", "0-3")])), T0),
    "PP3": (strategy((3, 1, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")])), T0),
    "HET4": (het4(), T0),
    "HET4 ZeRO-1": (het4(zero=1), T0),
    "HET4 ZeRO-1, tied": (het4(zero=1), TIED),
    "DP2 ZeRO-1": (strategy((2, 1, [stage("0", "0-3")]), (1, 1, [stage("1", "0-3")]), zero=1), T0),
    "CP2": (strategy((2, 1, [stage("0-1", "0-3", cp=2)])), T0),
    "interleaved beside one rank": (
        strategy(
            (3, 1, [stage("0", "0, 2"), stage("1", "1, 3")]),
            (1, 1, [stage("2", "0-3")]),
            schedule="interleaved",
        ),
        T0,
    ),
    "recomputed and offloaded": (
        strategy((2, 1, [replace(stage("0-1", "0-2"), recompute=MEMORY, offload=True), stage("2", "3")])),
        T0,
    ),
}


def shared(documents: Sequence[Document], pipelines: int, empty: bool = False) -> list[list[Document]]:
    """Documents dealt one by one: more to the first pipelines; or all to the last one."""
    if empty:
        return [[] for _ in range(pipelines - 1)] + [list(documents)]
    return [list(documents[number::pipelines]) for number in range(pipelines)]


def state_of(session: Session) -> list[Tensor]:
    counters = torch.tensor([session.iteration, session.skipped_iterations])
    return [*snapshot(session), session.state.gradient.clone(), counters]


def losses_of(model: torch.nn.Module, documents: Sequence[Document]) -> Evaluation:
    """One device, document by document."""
    total, count = 0.0, 0
    for document in documents:
        batch = micro_batch([document])
        total += model(batch.tokens_T, batch.targets_T, batch.segments).item()
        count += int(batch.valid_tokens)
    return Evaluation(total / count, count)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_equals_one_device_and_leaves_no_trace_in_training(layout: str) -> None:
    plan, config = LAYOUTS[layout]
    model_a, model_b = Llama(config), Llama(config)
    programs = [build(model, plan) for model in (model_a, model_b)]
    pipelines = len(plan.pipelines)

    def work(world: World) -> Any:
        watched = start(model_a, programs[0], world, ADAM, torch.float32, 7)
        alone = start(model_b, programs[1], world, ADAM, torch.float32, 7)
        number, _ = watched.program.pipeline_of(world.rank)
        multiple = watched.program.token_multiple(number)

        def batches(rows: list[list[Document]]) -> list[MicroBatch]:
            return [micro_batch([row], multiple) for row in rows[number]]

        def evaluate(empty: bool = False) -> Evaluation:
            before = state_of(watched)
            found = watched.evaluate(batches(shared(HELD_OUT, pipelines, empty)))
            assert all(map(torch.equal, before, state_of(watched))), "evaluation changed the state"
            assert left_over(watched) == {"between F and B": 0, "messages": 0, "sends": 0}
            return found

        evaluations = [evaluate()]
        if pipelines > 1:
            evaluations.append(evaluate(empty=True))
        results = []
        for step in range(2):
            rows = shared(D0[4 * step : 4 * step + 4], pipelines)
            results.append(watched.step(batches(rows)))
            evaluations.append(evaluate())
            other = alone.step(batches(rows))
            assert (other.loss, other.grad_norm) == (results[-1].loss, results[-1].grad_norm)
        assert all(map(torch.equal, state_of(watched), state_of(alone)))
        mine, others = watched.shards(), alone.shards()
        for name, shards in mine.items():
            assert all(torch.equal(shard, others[name][kind]) for kind, shard in shards.items()), name
        return evaluations, mine

    found = run_ranks(plan.ranks, work, 60)
    evaluations = found[plan.ranks[0]][0]
    assert all(each == evaluations for each, _ in found.values()), "ranks report different losses"
    whole = build_single_device(config, 7)
    first = losses_of(whole, HELD_OUT)
    tensors = assemble(programs[0], {rank: shards for rank, (_, shards) in found.items()})
    with torch.no_grad():
        for parameter_name, parameter in whole.named_parameters():
            parameter.copy_(tensors[parameter_name]["parameter"])
    last = losses_of(whole, HELD_OUT)
    assert last.loss != pytest.approx(first.loss, rel=1e-3), "the weights have moved"
    for mine, wanted in [*((each, first) for each in evaluations[:-2]), (evaluations[-1], last)]:
        assert mine.valid_tokens == wanted.valid_tokens == 15 + 2 + 15 + 8 + 15
        assert mine.loss == pytest.approx(wanted.loss, rel=LOSS_RTOL)


def test_what_cannot_be_evaluated_is_refused_before_anything_is_sent() -> None:
    model = Llama(T0)
    program = build(model, het3())

    def work(world: World) -> Any:
        session = start(model, program, world, ADAM, torch.float32, 7)
        nothing = session.evaluate([])
        masked = micro_batch([D0[0]])
        masked.targets_T.fill_(IGNORE)
        unpredicted = session.evaluate([masked])
        with pytest.raises(RuntimeFailure, match="pipeline 0 disagrees on micro-batches: stage 0") as refused:
            session.evaluate([micro_batch([D0[0]])] * (2 if world.rank == 2 else 1))
        if world.rank < 2:
            with pytest.raises(GraphError, match="T is 7, but must divide by 2"):
                session.evaluate([micro_batch([D0[0][:7]])])
        return nothing, unpredicted, str(refused.value)

    found = run_ranks(range(3), work, 30)
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == (Evaluation(0.0, 0), Evaluation(0.0, 0))


def test_several_evaluations_weigh_every_target_alike() -> None:
    assert Evaluation.of([]) == Evaluation(0.0, 0)
    parts = [Evaluation(3.0, 10), Evaluation(0.0, 0), Evaluation(5.0, 30)]
    assert Evaluation.of(parts) == Evaluation(4.5, 40)


def test_evaluation_neither_recomputes_nor_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a wrapper of the backward pass ran in an evaluation")

    monkeypatch.setattr("hetero_megatron.runtime.recompute.checkpoint", refuse)
    monkeypatch.setattr("hetero_megatron.runtime.offload.Offload.forward", refuse)
    alone = replace(stage("0", "0-3"), recompute=MEMORY, offload=True)
    model, plan = Llama(T0), strategy((1, 1, [alone]))
    program = build(model, plan)

    def work(world: World) -> Any:
        return start(model, program, world, ADAM, torch.float32, 7).evaluate([micro_batch(HELD_OUT)])

    assert run_ranks(range(1), work, 30)[0].valid_tokens == 55
