"""Evaluation of a fixed batch, and of a last batch that is not full (cases O-29 and O-50, as far as they evaluate)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.session import Evaluation, Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    LOSS_RTOL,
    T0,
    Document,
    Outcome,
    het4,
    micro_batch,
    sequences,
    stage,
    strategy,
    train,
)

D0 = sequences(24)
TIED = replace(T0, tie_word_embeddings=True)
# Lengths differ, so that a mean over samples or over batches is not the mean over tokens.
FIVE = tuple(document[:length] for document, length in zip(D0[12:17], (16, 5, 16, 11, 2), strict=True))


def one_device(config: LlamaConfig, found: Outcome, documents: Sequence[Document]) -> float:
    """The loss of `documents` as one batch on one device, with the parameters that `found` ended with."""
    model = build_single_device(config, 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.tensors[name]["parameter"])
        batch = micro_batch(documents)
        loss: float = model(batch.tokens_T, batch.targets_T, batch.segments).item() / int(batch.valid_tokens)
    return loss


def evaluate(session: Session, dealt: Sequence[Sequence[Sequence[Sequence[Document]]]]) -> Evaluation:
    """Batches after each other; each says which micro-batches of documents every pipeline takes."""
    number, _ = session.program.pipeline_of(session.world.rank)
    multiple = session.program.token_multiple(number)
    return Evaluation.of(
        [
            session.evaluate([micro_batch(documents, multiple) for documents in batch[number]])
            for batch in dealt
        ]
    )


@pytest.mark.parametrize(
    "plan",
    [
        strategy((3, 1, [stage("0", "0-3")])),
        strategy((3, 1, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")])),
    ],
    ids=["1 stage", "3 uneven stages"],
)
def test_a_tied_model_evaluates_a_fixed_batch_as_one_device_and_always_alike(plan: Strategy) -> None:
    found = train(
        plan,
        [D0[0:3], D0[3:6], D0[6:9]],
        TIED,
        collect=lambda session: [evaluate(session, [[[FIVE]]]) for _ in range(2)],
    )
    assert "head.weight" not in found.tensors
    for first, second in found.extra.values():
        assert first == second == found.extra[0][0]
        assert first.loss == pytest.approx(one_device(TIED, found, FIVE), rel=LOSS_RTOL)


def test_five_samples_over_two_pipelines_weigh_every_token_once() -> None:
    """Micro-batches of 2 samples over HET4: the second batch has one sample, and nothing for pipeline 1."""
    dealt: list[list[list[tuple[Document, ...]]]] = [[[FIVE[0:2]], [FIVE[2:4]]], [[FIVE[4:5]], []]]
    found = train(het4(), [D0[0:4]], collect=lambda session: evaluate(session, dealt))
    for evaluation in found.extra.values():
        assert evaluation == found.extra[0]
        assert evaluation.valid_tokens == 15 + 4 + 15 + 10 + 1
        assert evaluation.loss == pytest.approx(one_device(T0, found, FIVE), rel=LOSS_RTOL)
