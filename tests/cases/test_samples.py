"""Documents through packing and dispatch into real steps (cases O-39, O-50, O-52)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.lanes import flop_cost, lanes_of
from hetero_megatron.data.loader import Loader
from hetero_megatron.data.packing import DocumentPacking, Packing, RowPacking
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import Steps, StepSamples
from hetero_megatron.models.config import flops_per_token
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.courses import assert_as_if_never_stopped, run_course
from tests.distributed.training import (
    T0,
    Document,
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

# Which documents a rank trains on has nothing to do with where its states are; idle pipelines are harder with ZeRO-1.
ZERO_STAGES = (1,)
SGD = OptimizerSettings(name="sgd", lr=0.1)
D0 = sequences(24)
MIXED = tuple(
    document[:length]
    for document, length in zip(D0, (16, 3, 9, 1, 12, 7, 16, 5, 2, 11, 14, 4) * 2, strict=True)
)


class Listed:
    """Documents that are given as tuples of ids."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents])

    def name(self, index: int) -> str:
        return f"document {index}"

    def tokens(self, index: int) -> NDArray[np.int64]:
        return np.array(self.documents[index])


def every_step(steps: Steps, most: int = 100) -> list[StepSamples]:
    found, position = [], DataPosition()
    while len(found) < most and (step := steps.at(position)) is not None:
        found.append(step)
        position = steps.after(step)
    return found


def documents_of(steps: Steps, step: StepSamples) -> tuple[Document, ...]:
    pieces = [piece for number in step.numbers for piece in steps.samples.sample(number)]
    return tuple(tuple(piece.tokens_T.tolist()) for piece in pieces)


def packing_of(steps: Steps, session: Session) -> Packing:
    if steps.packing == "rows":
        sizes = [(p.micro_batches, p.micro_batch_size) for p in session.program.strategy.pipelines]
        return RowPacking(steps.samples, steps.global_batch_size, sizes)
    lanes, linear = lanes_of(session.program, steps.seq_length), flops_per_token(T0, 0)
    cost = flop_cost(linear, flops_per_token(T0, 1) - linear, lanes)
    return DocumentPacking(steps.samples, steps.seq_length, lanes, cost)


class Loaded:
    """What `train` asks for each step's micro-batches: every rank loads those of its pipeline."""

    def __init__(self, steps: Steps, position: DataPosition = DataPosition()) -> None:  # noqa: B008
        self.steps, self.position = steps, position
        self.loader: Loader | None = None

    def __call__(self, session: Session, _: int, __: list[MicroBatch]) -> list[MicroBatch]:
        if self.loader is None:
            number, ___ = session.program.pipeline_of(session.world.rank)
            multiple = session.program.token_multiple(number)
            packing = packing_of(self.steps, session)
            self.loader = Loader(self.steps, packing, number, multiple, self.position, workers=0)
            self.loader.start()
        step = self.loader.next(session.world.device)
        assert step is not None
        return step.batches


# Documents that are packed train as they do alone (O-39).


@pytest.mark.parametrize(
    "plan", [strategy((4, 1, [stage("0", "0-3")])), het4((3, 1), (1, 1))], ids=["1 rank", "HET4"]
)
def test_packed_documents_train_as_they_do_one_by_one(plan: Strategy) -> None:
    steps = Steps(DocumentSamples(Listed(MIXED), 5, 16), 4, 16, "documents")
    taken = every_step(steps, 3)
    assert all(len({*map(len, documents_of(steps, step))}) > 2 for step in taken)
    found = train(plan, [D0[:4]] * 3, settings=SGD, batches_of=Loaded(steps), timeout_s=30)
    wanted = reference([documents_of(steps, step) for step in taken], settings=SGD, packed=False)
    assert_parity(found, wanted)


# The last step is not full (O-50).


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_a_last_sample_alone_is_trained_on_by_one_of_two_pipelines(packing: str) -> None:
    five = Listed(D0[:5])
    if packing == "rows":
        steps = Steps(PackedRows(five, 1, 16), 4, 16, "rows", 1.0)
    else:
        steps = Steps(DocumentSamples(five, 1, 16), 4, 16, "documents", 1.0)
    taken = every_step(steps)
    assert [list(step.numbers) for step in taken] == [[0, 1, 2, 3], [4]]
    seen = [documents_of(steps, step) for step in taken]
    assert sorted(sum(seen, ())) == sorted(D0[:5])
    sizes = [(1, 2), (1, 2)]
    found = train(het4(*sizes), [D0[:4]] * 2, settings=SGD, batches_of=Loaded(steps), timeout_s=30)
    assert [result.valid_tokens for result in found.results] == [60, 15]
    assert_parity(found, reference(seen, settings=SGD))


# Another number of pipelines after a stop (O-52).


def test_any_number_of_pipelines_goes_on_with_exactly_the_next_samples(tmp_path: Path) -> None:
    steps = Steps(PackedRows(Listed(D0), 1, 16), 6, 16, "rows", 1.0)
    taken = every_step(steps)
    assert [step.numbers for step in taken] == [range(0, 6), range(6, 12), range(12, 18), range(18, 24)]
    assert sorted(sum((documents_of(steps, step) for step in taken), ())) == sorted(D0), "one pass, once each"
    two, three = (
        strategy(*((6 // count, 1, [stage(str(rank), "0-3")]) for rank in range(count)), zero=1)
        for count in (2, 3)
    )
    course = run_course(two, [D0[:6]] * 4, 2, tmp_path, settings=SGD, batches_of=Loaded(steps))
    assert_parity(course.outcome, reference([documents_of(steps, step) for step in taken], settings=SGD))
    next_sample = DataPosition(2, 12)
    one = strategy((6, 1, [stage("0", "0-3")]), zero=1)
    for plan in (one, three, het4((4, 1), (2, 1), zero=1)):
        assert_as_if_never_stopped(course, plan, settings=SGD, batches_of=Loaded(steps, next_sample))
