"""Documents through packing and dispatch into real steps (cases O-39, O-50)."""

from collections.abc import Sequence

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


class Loaded:
    """What `train` asks for each step's micro-batches: every rank loads those of its pipeline."""

    def __init__(self, steps: Steps, rows: Sequence[tuple[int, int]] | None = None) -> None:
        self.steps, self.rows = steps, rows
        self.loader: Loader | None = None

    def __call__(self, session: Session, _: int, __: list[MicroBatch]) -> list[MicroBatch]:
        if self.loader is None:
            number, ___ = session.program.pipeline_of(session.world.rank)
            lanes = lanes_of(session.program, self.steps.seq_length)
            linear = flops_per_token(T0, 0)
            cost = flop_cost(linear, flops_per_token(T0, 1) - linear, lanes)
            samples = self.steps.samples
            packing: Packing = (
                RowPacking(samples, self.steps.global_batch_size, self.rows)
                if self.rows
                else DocumentPacking(samples, self.steps.seq_length, lanes, cost)
            )
            self.loader = Loader(self.steps, packing, number, lanes[number].multiple, workers=0)
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
    loaded = Loaded(steps, sizes if packing == "rows" else None)
    found = train(het4(*sizes), [D0[:4]] * 2, settings=SGD, batches_of=loaded, timeout_s=30)
    assert [result.valid_tokens for result in found.results] == [60, 15]
    assert_parity(found, reference(seen, settings=SGD))
