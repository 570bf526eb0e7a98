"""Steps whose strategy is chosen ahead: the same with any number of workers, in blocks (paper A.1, scenario c)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from hetero_megatron.data.document_dispatch import DispatchReport
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.loader import LoadedStep, Loader
from hetero_megatron.data.packing import Numbers
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.strategy_packing import StrategyPacking
from hetero_megatron.errors import DataError
from tests.data.memory import MemoryDocuments

SIZES = (5, 9, 2, 7, 16, 1, 30, 4, 4, 11)


@dataclass(frozen=True)
class Taken:
    strategy: int
    pipelines: Numbers
    report: DispatchReport


class ByLongest:
    """Strategy 0: all to one pipeline; strategy 1, for documents below 10 tokens: alternating over two."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []

    def choose_many(self, steps: Sequence[Sequence[int]], before: int | None = None) -> list[Taken]:
        self.asked.append((len(steps), before))
        return [self._one(lengths) for lengths in steps]

    def _one(self, lengths: Sequence[int]) -> Taken:
        if max(lengths) > 16:
            raise DataError("too long")
        numbers = tuple(range(len(lengths)))
        short = max(lengths) < 10
        pipelines = ((numbers[::2],), (numbers[1::2],) if numbers[1:] else ()) if short else ((numbers,), ())
        seconds = (float(sum(lengths)),)
        return Taken(int(short), pipelines, DispatchReport(sum(lengths), 0, seconds, seconds[0], 1.0))


def loader(workers: int, position: DataPosition = DataPosition(), rank: int = 0) -> Loader:  # noqa: B008
    samples = DocumentSamples(MemoryDocuments(SIZES), 0, 16)
    steps = Steps(samples, 2, 16, "documents", 3.0)
    # Rank 0 stands in pipeline 0 of both, rank 1 has work in the second strategy only.
    places = ((0, 4), (0, 2)) if rank == 0 else (None, (1, 2))
    packing = StrategyPacking(samples, 16, ByLongest(), lookahead=3)
    return Loader(steps, packing, 0, 1, position, workers, 2, places)


def all_steps(made: Loader) -> Iterator[LoadedStep]:
    with made:
        while (step := made.next()) is not None:
            yield step


def told(step: LoadedStep) -> tuple[object, ...]:
    return step.strategy, step.samples, step.tokens, step.padding, [b.tokens_T.tolist() for b in step.batches]


def test_steps_take_their_strategy_and_its_places_with_any_number_of_workers() -> None:
    alone = [told(step) for step in all_steps(loader(0))]
    assert {strategy for strategy, *_ in alone} == {0, 1}
    for workers in (1, 2):
        assert [told(step) for step in all_steps(loader(workers))] == alone
    other = list(all_steps(loader(0, rank=1)))
    assert [step.strategy for step in other] == [strategy for strategy, *_ in alone]
    for step in other:
        assert bool(step.batches) is (step.strategy == 1 and step.samples.count > 1)
    for step in all_steps(loader(0)):
        assert all(len(batch.tokens_T) % (2 if step.strategy else 4) == 0 for batch in step.batches)


def test_a_resumed_run_takes_the_same_samples() -> None:
    whole = list(all_steps(loader(0)))
    again = list(all_steps(loader(1, whole[1].position)))
    assert [told(step) for step in again] == [told(step) for step in whole[2:]]


def test_blocks_follow_each_other_and_know_the_strategy_before_them() -> None:
    samples = DocumentSamples(MemoryDocuments(SIZES), 0, 16)
    chooser = ByLongest()
    packing = StrategyPacking(samples, 16, chooser, lookahead=3)
    made = Loader(Steps(samples, 2, 16, "documents", 3.0), packing, 0, 1, None, 0, 2, ((0, 1), (0, 1)))
    strategies = [step.strategy for step in all_steps(made)]
    blocks = chooser.asked[1:]
    assert [count for count, _ in blocks][:-1] == [3] * (len(blocks) - 1)
    assert [before for _, before in blocks] == [None, *(strategies[3 * n - 1] for n in range(1, len(blocks)))]


def test_a_length_that_no_strategy_holds_is_refused_at_the_start() -> None:
    samples = DocumentSamples(MemoryDocuments(SIZES), 0, 32)
    with pytest.raises(DataError, match="too long"):
        StrategyPacking(samples, 32, ByLongest())
