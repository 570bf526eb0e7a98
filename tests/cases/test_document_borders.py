"""Documents that share a row: nothing crosses their borders, whatever the segment list and the padding look like.

Every attention backend on offer is tried on one device; those that can run on the CPU under strategies, too.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import Attention
from hetero_megatron.layers.kernels import Facts, Kernel
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.runtime.batch import IGNORE, MicroBatch, Segments
from hetero_megatron.runtime.binding import Binding
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    ATOL,
    RTOL,
    T0,
    Document,
    assert_parity,
    het4,
    micro_batch,
    reference,
    sequences,
    stage,
    strategy,
    train,
)
from tests.layers.backends import Here, backends, here, on_cpu_ranks

SGD = OptimizerSettings(name="sgd", lr=0.02)
FACTS = Facts(T0.head_size)
A, B, C = (sequences(1, length, seed=length)[0] for length in (7, 9, 5))
ONE, TP2 = (strategy((2, 2, [stage(ranks, "0-3")])) for ranks in ("0", "0-1"))
STRATEGIES = pytest.mark.parametrize(
    "plan", [ONE, TP2, het4((2, 2), (1, 1))], ids=["one rank", "TP2", "HET4"]
)
Gradients = dict[str, Tensor]


def llama(at: Here) -> Llama:
    """T0 on one device with this attention."""
    model = build_single_device(T0, 7, at.dtype, at.device)
    for name, layer in model.named_modules():
        if isinstance(layer, Attention):
            layer.bind(Binding(name, {}, {}, kernels={"attention": at.operator}))
    return model


def run(at: Here, batch: MicroBatch) -> tuple[Tensor, float, Gradients]:
    """Logits, loss sum and its gradients."""
    model = llama(at)
    positions = batch.segments.positions_T.to(at.device)
    segments = replace(batch.segments, positions_T=positions)
    tokens, targets = batch.tokens_T.to(at.device), batch.targets_T.to(at.device)
    logits = model.logits(tokens, segments).detach()
    loss = model(tokens, targets, segments)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits, loss.item(), gradients


def assert_same_gradients(found: Gradients, wanted: Gradients, at: Here | None = None) -> None:
    """PARITY of gradients; in BF16 to its own rounding."""
    exact = at is None or at.dtype is torch.float32
    tolerances = {"rtol": RTOL, "atol": ATOL} if exact or at is None else at.tolerances
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, **tolerances, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal_gradients(found: Gradients, wanted: Gradients) -> None:
    """Bit for bit, and finite."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(found[name], gradient), name


def rows_of(plan: Strategy, first: Document = A) -> tuple[Document, ...]:
    """A row for each place in a step: first + B packed, C + B packed, and C by itself where there is a fifth place."""
    return (first, B, C, B, C)[: sum(p.micro_batches * p.micro_batch_size for p in plan.pipelines)]


def ignoring(document: Document) -> dict[Document, Sequence[int]]:
    return {document: range(len(document))}


# Attention crosses document borders (O-38).


@backends("attention")
def test_logits_of_a_document_do_not_depend_on_what_stands_before_it(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    logits = [run(at, micro_batch(documents))[0][-len(B) :] for documents in ((B,), (A, B), (C, B))]
    bound = 1e-5 if at.dtype is torch.float32 else 1e-2
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() <= bound
    packed = micro_batch((A, B))
    leaking = replace(packed, segments=Segments(packed.segments.positions_T, (0, len(A) + len(B))))
    assert (run(at, leaking)[0][-len(B) :] - logits[0]).abs().max() > 10 * bound, "the fault would show"


@backends("attention")
def test_packed_gradients_are_those_of_separate_rows(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    for documents in ((A, B), (C, B)):
        _, loss, found = run(at, micro_batch(documents))
        rows = [run(at, micro_batch((document,))) for document in documents]
        assert loss == pytest.approx(
            sum(row[1] for row in rows), rel=1e-5 if at.dtype is torch.float32 else 1e-2
        )
        wanted = {name: sum((row[2][name] for row in rows), torch.zeros_like(found[name])) for name in found}
        assert_same_gradients(found, wanted, at)


@backends("attention")
def test_a_changed_token_leaves_the_loss_of_the_next_document_bit_equal(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    _, before, gradients = run(at, micro_batch((A, B), masks=ignoring(A)))
    for place in range(len(A)):
        other = (*A[:place], 3 + (A[place] - 2) % 93, *A[place + 1 :])
        assert other != A
        _, after, changed = run(at, micro_batch((other, B), masks=ignoring(other)))
        assert after == before
        assert_equal_gradients(changed, gradients)


@backends("attention")
@STRATEGIES
def test_packed_rows_train_like_separate_rows_under_a_strategy(kernel: Kernel, plan: Strategy) -> None:
    kernels = {"attention": on_cpu_ranks(kernel, FACTS)}
    rows = rows_of(plan)
    found = train(plan, [rows] * 3, settings=SGD, kernels=kernels)
    assert_parity(found, reference([rows] * 3, settings=SGD, packed=False))


@backends("attention")
@STRATEGIES
def test_a_changed_token_leaves_the_other_losses_bit_equal_under_a_strategy(
    kernel: Kernel, plan: Strategy
) -> None:
    kernels = {"attention": on_cpu_ranks(kernel, FACTS)}
    other = (*A[:3], 3 + (A[3] - 2) % 93, *A[4:])
    losses = []
    for first in (A, other):
        rows = (first, *rows_of(plan)[1:])
        losses.append(train(plan, [rows] * 3, settings=SGD, masks=ignoring(first), kernels=kernels).losses)
    assert losses[0] == losses[1]


# Empty segments in the segment list (O-40).

ROW = micro_batch((A[:5], B[:4]))


def with_ends(batch: MicroBatch, *ends: int) -> MicroBatch:
    return replace(batch, segments=Segments(batch.segments.positions_T, ends))


@backends("attention")
def test_empty_segments_change_neither_logits_nor_gradients(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    logits, loss, gradients = run(at, with_ends(ROW, 0, 5, 9))
    found, found_loss, found_gradients = run(at, with_ends(ROW, 0, 0, 5, 5, 9, 9))
    assert torch.isfinite(logits).all()
    assert torch.equal(found, logits)
    assert found_loss == loss
    assert_equal_gradients(found_gradients, gradients)
    used = torch.zeros(T0.vocab_size, dtype=torch.bool)
    used[ROW.tokens_T[ROW.targets_T != IGNORE]] = True  # nothing follows from a document's last token
    assert torch.equal(gradients["embedding.weight"].any(1).cpu(), used)


@backends("attention")
def test_documents_of_at_most_one_token_are_finite_and_see_only_themselves(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    zero = torch.zeros(3, dtype=torch.int64)
    row = MicroBatch(torch.tensor([5, 6, 7]), torch.tensor([6, 7, 8]), Segments(zero, (0, 1, 2, 3)))
    logits, _, gradients = run(at, row)
    found, _, found_gradients = run(at, with_ends(row, 0, 0, 1, 1, 2, 3, 3))
    assert torch.equal(found, logits)
    assert_equal_gradients(found_gradients, gradients)
    for place in range(3):
        token = row.tokens_T[place : place + 1]
        alone = MicroBatch(token, row.targets_T[:1], Segments.of_lengths((1,)))
        torch.testing.assert_close(run(at, alone)[0][0], logits[place], **at.tolerances)


@backends("attention")
@pytest.mark.parametrize("ends", [(0, 4), (0, 0, 4, 4), (0, 1, 2, 3, 4)], ids=str)
def test_a_row_of_pads_only_has_loss_0_and_no_gradient(kernel: Kernel, ends: tuple[int, ...]) -> None:
    at = here(kernel, FACTS)
    pads = torch.zeros(4, dtype=torch.int64)
    logits, loss, gradients = run(at, MicroBatch(pads, pads + IGNORE, Segments(torch.arange(4), ends)))
    assert torch.isfinite(logits).all()
    assert loss == 0.0
    for name, gradient in gradients.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@backends("attention")
@STRATEGIES
def test_empty_segments_and_a_micro_batch_of_pads_change_nothing_under_a_strategy(
    kernel: Kernel, plan: Strategy
) -> None:
    """The last micro-batch of a pipeline holds pads in place of its documents, which REF never sees."""
    kernels = {"attention": on_cpu_ranks(kernel, FACTS)}
    last = plan.pipelines[-1]
    rows, dropped = rows_of(plan), last.micro_batch_size
    documents = rows[: len(rows) - dropped]

    def altered(session: Session, _: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        made = [with_ends(b, 0, *(e for end in b.segments.cu_seqlens for e in (end, end))) for b in batches]
        number, _ = session.program.pipeline_of(session.world.rank)
        if number == len(plan.pipelines) - 1:
            pads = torch.zeros(4, dtype=torch.int64)
            made[-1] = MicroBatch(pads, pads + IGNORE, Segments(torch.arange(4), (0, 0, 4, 4)))
        return made

    found = train(plan, [rows] * 3, settings=SGD, kernels=kernels, batches_of=altered)
    assert_parity(found, reference([documents] * 3, settings=SGD))


# A pad tail behind the last real segment (O-41).


def fill_freed_memory_with_nan(device: torch.device) -> None:
    """Whoever reads memory that was only allocated finds NaN there."""
    sizes = [2**power + extra for power in range(4, 18) for extra in (0, 2**power // 2)]
    blocks = [torch.full((size,), float("nan"), device=device) for size in sizes for _ in range(8)]
    del blocks
    assert any(torch.empty(size, device=device).isnan().any() for size in sizes), "no freed memory came back"


def padded(batch: MicroBatch, tokens: int, pad: int) -> MicroBatch:
    """The micro-batch followed by pads, which are a segment of their own, up to `tokens`."""
    lengths = [*torch.tensor(batch.segments.cu_seqlens).diff().tolist(), tokens - batch.segments.tokens]
    tail = torch.full((lengths[-1],), pad)
    return MicroBatch(
        torch.cat([batch.tokens_T, tail]),
        torch.cat([batch.targets_T, torch.full_like(tail, IGNORE)]),
        Segments.of_lengths(tuple(lengths)),
    )


@backends("attention")
def test_a_padded_row_has_the_gradients_of_the_bare_one_whatever_the_pad_id(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    logits, loss, gradients = run(at, ROW)
    outcomes = []
    for pad in (0, 77):
        fill_freed_memory_with_nan(at.device)
        outcomes.append(run(at, padded(ROW, 12, pad)))
    for found, found_loss, found_gradients in outcomes:
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[:9], logits, **at.tolerances)
        assert found_loss == pytest.approx(loss, rel=1e-5 if at.dtype is torch.float32 else 1e-2)
        assert_same_gradients(found_gradients, gradients, at)
    assert outcomes[0][1] == outcomes[1][1]
    assert_equal_gradients(outcomes[0][2], outcomes[1][2])


@backends("attention")
def test_tokens_behind_the_last_segment_are_refused_rather_than_left_uninitialised(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    short = replace(padded(ROW, 12, 0), segments=Segments(torch.arange(12), (0, 5, 9)))
    with pytest.raises(LayerError, match="attention: 12 tokens, but segments end at 9"):
        run(at, short)


@backends("attention")
@STRATEGIES
def test_pads_behind_the_documents_leave_no_trace_under_a_strategy(kernel: Kernel, plan: Strategy) -> None:
    kernels = {"attention": on_cpu_ranks(kernel, FACTS)}
    rows = rows_of(plan, A[:5])

    def poison(session: Session, _: int) -> None:
        fill_freed_memory_with_nan(session.world.device)

    outcomes = [
        train(
            plan,
            [rows] * 3,
            settings=SGD,
            kernels=kernels,
            before_step=poison,
            batches_of=lambda session, step, batches, pad=pad: [padded(b, 18, pad) for b in batches],
        )
        for pad in (0, 77)
    ]
    wanted = reference([rows] * 3, settings=SGD)
    for found in outcomes:
        assert_parity(found, wanted)
    assert outcomes[0].losses == outcomes[1].losses
    gradients = [{name: t["gradient"] for name, t in found.tensors.items()} for found in outcomes]
    assert_equal_gradients(*gradients)
