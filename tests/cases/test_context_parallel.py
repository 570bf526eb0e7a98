"""Faults of other systems with context parallelism: lost tokens, empty ranks, wrong divisors, crossed borders."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime import context
from hetero_megatron.runtime.batch import IGNORE, MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    ATOL,
    RTOL,
    T0,
    Document,
    Outcome,
    assert_parity,
    micro_batch,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

D0 = sequences(24)
SGD = OptimizerSettings(name="sgd", lr=0.1)
MODES = pytest.mark.parametrize("mode", ["ring", "ulysses"])


def cp2(micro_batches: int, size: int, **options: Any) -> Strategy:
    return strategy((micro_batches, size, [stage("0-1", "0-3", cp=2)]), **options)


class Logits:
    """What the head gives in every forward pass of this rank, with the place of each row in the micro-batch."""

    def __init__(self) -> None:
        self.found: list[tuple[list[int], int, Tensor]] = []

    def prepare(self, session: Session) -> None:
        own_tokens, queue = session.stage.own_tokens, []

        def seen(batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
            own = own_tokens(batches)
            queue.extend(batch.segments.context for batch in own)
            return own

        def hook(head: torch.nn.Module, inputs: object, logits_TV: Tensor) -> None:
            share = queue.pop(0)
            index = share.parts[share.part].index.tolist()
            self.found.append((index, first, logits_TV[: len(index)].detach().clone()))

        (first,) = (s.bounds[0][0] for s in session.state.parameter_slots if s.name == "head.weight")
        session.stage.own_tokens = seen  # type: ignore[method-assign]  # looks, changes nothing
        session.stage._runs[0].module.get_submodule("head").register_forward_hook(hook)


def logits_of(
    plan: Strategy, steps: Sequence[Sequence[Document]], **options: Any
) -> tuple[Outcome, list[Tensor]]:
    """A run, and the logits [T, V] of every micro-batch of its steps in packed order."""
    logits = Logits()
    found = train(
        plan,
        [tuple(step) for step in steps],
        settings=SGD,
        prepare=logits.prepare,
        collect=lambda session: logits.found,
        **options,
    )
    whole = []
    for pieces in zip(*found.extra.values(), strict=True):
        tokens = 1 + max(max(index, default=-1) for index, _, _ in pieces)
        joined = torch.full((tokens, T0.vocab_size), float("nan"))
        for index, first, piece in pieces:
            joined[index, first : first + piece.shape[1]] = piece
        assert not joined.isnan().any(), "every real token has logits"
        whole.append(joined)
    return found, whole


def one_device(documents: Sequence[Document]) -> Tensor:
    batch = micro_batch(documents)
    return build_single_device(T0, 7).logits(batch.tokens_T, batch.segments).detach()


# Odd lengths lose their last token (O-14).

SEVEN_FIVE = (D0[0][:7], D0[1][:5])


@MODES
@pytest.mark.parametrize(
    "plan", [cp2(1, 2), strategy((1, 2, [stage("0-3", "0-3", cp=2)]))], ids=["CP2", "CP2xTP2"]
)
def test_odd_lengths_lose_no_token_and_padding_has_no_influence(plan: Strategy, mode: str) -> None:
    plan = replace(plan, context_parallel=mode)

    def padded(pad: int) -> Callable[[Session, int, list[MicroBatch]], list[MicroBatch]]:
        """As a product with a row length of 16 would pad: a segment of its own, here with this id."""

        def batches(session: Session, step: int, given: list[MicroBatch]) -> list[MicroBatch]:
            (batch,) = [micro_batch(SEVEN_FIVE, 16) for _ in given]
            batch.tokens_T[12:] = pad
            return [batch]

        return batches

    wanted = one_device(SEVEN_FIVE)
    plain, (bare,) = logits_of(plan, [SEVEN_FIVE])
    assert_parity(plain, reference([SEVEN_FIVE], settings=SGD))
    found = [logits_of(plan, [SEVEN_FIVE], batches_of=padded(pad)) for pad in (0, 95)]
    for logits in (bare, *(own for _, (own,) in found)):
        for token in (6, 11):
            assert (logits[token] - wanted[token]).abs().max() < 1e-5, f"token {token}"
        assert (logits[:12] - wanted).abs().max() < 1e-5
    (quiet, (zeros,)), (wild, (others,)) = found
    assert torch.equal(zeros[:12], others[:12]), "bit-equal whatever stands in the padding"
    assert quiet.losses == wild.losses
    assert_parity(wild, reference([SEVEN_FIVE], settings=SGD))


@MODES
def test_the_padding_inside_a_part_has_no_influence(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of twelve tokens on four tensor-parallel ranks: each part pads its own to eight."""
    heads = replace(T0, num_attention_heads=8)
    plan = strategy((1, 2, [stage("0-7", "0-3", cp=2)]), context_parallel=mode)
    assert [part.tokens - part.real for part in context.share((0, 7, 12), (1, 1), (4, 4))] == [2, 2]
    runs = []
    for pad in (0, 95):
        monkeypatch.setattr(context, "PAD", pad)
        runs.append(train(plan, [SEVEN_FIVE], config=heads, settings=SGD))
    assert_parity(runs[0], reference([SEVEN_FIVE], config=heads, settings=SGD))
    assert runs[0].losses == runs[1].losses
    for name, tensors in runs[0].tensors.items():
        for kind, tensor in tensors.items():
            assert torch.equal(tensor, runs[1].tensors[name][kind]), f"{kind} of {name}"


# Very short documents leave ranks without a token (O-15).


@MODES
@pytest.mark.parametrize("lengths", [(1, 2, 3, 16), (1,), (2,), (3,), (1, 1)], ids=str)
def test_documents_shorter_than_the_ranks_train(lengths: tuple[int, ...], mode: str) -> None:
    plan = strategy((1, 4, [stage("0-3", "0-3", cp=2)]), context_parallel=mode)
    step = tuple(document[:length] for document, length in zip(D0, lengths, strict=False))
    found = train(plan, [step] * 3, settings=SGD, timeout_s=60)
    valid = sum(length - 1 for length in lengths)
    assert [result.valid_tokens for result in found.results] == [valid] * 3
    if lengths == (1, 2, 3, 16):
        assert valid == 18
    if valid:
        assert_parity(found, reference([step] * 3, settings=SGD))
    else:
        assert {result.skipped for result in found.results} == {"0 tokens: nothing to predict in this step"}


# Each part divides by its own count, or the count misses parts (O-20).

LONG = sequences(12, 32, seed=3)
FIRST = context.share((0, 32), (1, 1), (1, 1))[0].index.tolist()
SECOND = context.share((0, 32), (1, 1), (1, 1))[1].index.tolist()


@MODES
@pytest.mark.parametrize(("many", "one"), [(FIRST, SECOND), (SECOND, FIRST)], ids=["12+1", "1+12"])
def test_the_loss_is_divided_by_the_targets_of_all_parts(many: list[int], one: list[int], mode: str) -> None:
    valid = {*many[:12], one[5]}
    masks = {document: [at for at in range(32) if at not in valid] for document in LONG}
    steps = [(document,) for document in LONG[:3]]
    found = train(cp2(1, 1, context_parallel=mode), steps, settings=SGD, masks=masks)
    wanted = reference(steps, settings=SGD, masks=masks)
    assert [result.valid_tokens for result in found.results] == [13, 13, 13]
    assert_parity(found, wanted)

    batch = micro_batch(steps[0], masks=masks)
    logits = build_single_device(T0, 7).logits(batch.tokens_T, batch.segments)
    total = F.cross_entropy(logits, batch.targets_T, ignore_index=IGNORE, reduction="sum").item()
    assert found.losses[0] == pytest.approx(total / 13, rel=1e-5)
    ours, theirs = (
        torch.cat([tensors["gradient"].flatten() for tensors in outcome.tensors.values()]).double()
        for outcome in (
            found,
            replace(wanted, tensors={name: wanted.tensors[name] for name in found.tensors}),
        )
    )
    assert float(ours @ theirs / (theirs @ theirs)) == pytest.approx(1.0, abs=1e-4)


@MODES
def test_dp2_cp2_is_dp4(mode: str) -> None:
    masks = {document: range(at % 7, at % 7 + 9) for at, document in enumerate(LONG)}
    steps = [LONG[at : at + 4] for at in (0, 4, 8)]
    both = strategy(
        (2, 1, [stage("0-1", "0-3", cp=2)]), (2, 1, [stage("2-3", "0-3", cp=2)]), context_parallel=mode
    )
    four = strategy(*[(1, 1, [stage(str(rank), "0-3")]) for rank in range(4)])
    found, wanted = (train(plan, steps, settings=SGD, masks=masks) for plan in (both, four))
    assert [r.valid_tokens for r in found.results] == [r.valid_tokens for r in wanted.results]
    assert_parity(found, wanted)
    assert_parity(found, reference(steps, settings=SGD, masks=masks))


# Attention crosses document borders (O-38, the part for CP2).

A, B, C = (sequences(1, length, seed=length)[0] for length in (7, 9, 5))


@MODES
def test_a_document_does_not_depend_on_what_stands_before_it(mode: str) -> None:
    rows = [(A,), (B,), (A, B), (C, B)]
    # One row per step and no update between them: every row is the first step of its own run.
    logits = [logits_of(cp2(1, 2, context_parallel=mode), [row])[1][0] for row in rows]
    alone = one_device((B,))
    for of_b in (logits[1], logits[2][7:], logits[3][5:]):
        assert (of_b - alone).abs().max() < 1e-5


@MODES
def test_packed_gradients_are_those_of_separate_rows(mode: str) -> None:
    rows = [(A, B), (C, B)]
    found = train(cp2(2, 2, context_parallel=mode), [(*rows[0], *rows[1])], settings=SGD)
    model = build_single_device(T0, 7)
    total, count = torch.zeros(()), 0
    for document in (A, B, C, B):
        batch = micro_batch((document,))
        total, count = (
            total + model(batch.tokens_T, batch.targets_T, batch.segments),
            count + int(batch.valid_tokens),
        )
    (total / count).backward()
    assert found.losses[0] == pytest.approx(total.item() / count, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found.tensors[name]["gradient"],
            parameter.grad,
            rtol=RTOL,
            atol=ATOL,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@MODES
def test_a_changed_token_of_one_document_leaves_the_other_s_loss_bit_equal(mode: str) -> None:
    changed = (*A[:3], 90, *A[4:])
    assert changed != A
    plan = cp2(1, 2, context_parallel=mode)
    (before,), (after,) = (logits_of(plan, [(first, B)])[1] for first in (A, changed))
    targets = torch.tensor([*B[1:], IGNORE])
    losses = [F.cross_entropy(x[7:], targets, ignore_index=IGNORE, reduction="none") for x in (before, after)]
    assert torch.equal(*losses)
    assert torch.equal(before[7:], after[7:])
    assert not torch.equal(before[:7], after[:7])
