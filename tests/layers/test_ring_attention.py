"""Ring attention and Ulysses against attention over the whole documents on one device."""

import pytest
import torch
from torch import Tensor

from hetero_megatron.layers import Attention, document_borders
from hetero_megatron.runtime.batch import MicroBatch, Segments
from hetero_megatron.runtime.binding import Binding
from hetero_megatron.runtime.context import ContextLayout
from hetero_megatron.runtime.context_group import GRADIENTS_TAG, KEYS_TAG
from tests.layers.parts import Mail, groups, on_all

K, HEADS, KV_HEADS = 8, 8, 4
LENGTHS = [(32,), (7, 5), (1,), (1, 2, 3, 16), (8, 8, 8, 8), (0, 5, 0, 9), (33, 1, 1, 1, 20)]
SIZES = {"CP2": (1, 1), "CP3": (1, 1, 1), "CP2xTP2": (2, 2), "TP2+TP1": (2, 1), "TP1+TP4": (1, 4)}
COPIES = {"TP8+TP8": (8, 8), "TP8+TP2": (8, 2), "TP1+TP8": (1, 8)}

Columns = tuple[int, int]
Results = tuple[Tensor, list[Tensor]]


def qkv(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    widths = (HEADS * K, KV_HEADS * K, KV_HEADS * K, HEADS * K)
    return [torch.randn(tokens, width, generator=generator).to(dtype) for width in widths]


def whole(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Results:
    *inputs, weights = qkv(sum(lengths), dtype)
    leaves = [x.requires_grad_() for x in inputs]
    result = Attention(K, document_borders())(*leaves, Segments.of_lengths(lengths))
    return result, list(torch.autograd.grad(result, leaves, weights))


def columns_of(place: int, tp: int, heads: int) -> Columns:
    """Columns of a tensor-parallel rank; several ranks hold copies of a head where there are not enough."""
    if tp > heads:
        head = place * heads // tp
        return head * K, (head + 1) * K
    return place * heads // tp * K, (place + 1) * heads // tp * K


def in_parts(
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    mode: str = "ring",
    dtype: torch.dtype = torch.float32,
    mail: Mail | None = None,
) -> Results:
    """The same, cut over parts with these tensor-parallel sizes, and put together again."""
    places = [(part, place) for part, tp in enumerate(sizes) for place in range(tp)]
    ranks = {place: rank for rank, place in enumerate(places)}
    parts = [
        [(ranks[part, place], columns_of(place, tp, KV_HEADS)) for place in range(tp)]
        for part, tp in enumerate(sizes)
    ]
    members = groups(mode, parts, mail or Mail())
    values = qkv(sum(lengths), dtype)
    segments = Segments.of_lengths(lengths)
    batch = MicroBatch(torch.arange(segments.tokens), torch.arange(segments.tokens), segments)

    def work(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        part, place = places[rank]
        own = ContextLayout(part, sizes, sizes).cut(batch)
        context = own.segments.context
        assert context is not None
        index = context.parts[part].index
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        local = []
        for value, count in zip(values, heads, strict=True):
            lo, hi = columns_of(place, sizes[part], count)
            padded = torch.full((own.segments.tokens, hi - lo), 1e4, dtype=dtype)
            padded[: len(index)] = value[index, lo:hi]
            local.append(padded)
        layer = Attention(K, document_borders())
        layer.bind(Binding("attention", {}, {}, context=members[rank]))
        *inputs, weights = local
        weights[len(index) :] = 0.0  # nothing comes back to padding: it has no target
        leaves = [x.requires_grad_() for x in inputs]
        result = layer(*leaves, own.segments)
        assert not result[len(index) :].any(), "padding gives zeros"
        gradients = torch.autograd.grad(result, leaves, weights)
        assert not any(gradient[len(index) :].any() for gradient in gradients)
        return index, result[: len(index)].detach(), [gradient[: len(index)] for gradient in gradients]

    found = on_all(range(len(places)), work)
    result, *sums = (torch.zeros_like(values[at]) for at in (3, 0, 1, 2))
    for rank, (index, own, gradients) in found.items():
        part, place = places[rank]
        lo, hi = columns_of(place, sizes[part], HEADS)
        result[index, lo:hi] = own
        for total, gradient, count in zip(sums, gradients, (HEADS, KV_HEADS, KV_HEADS), strict=True):
            lo, hi = columns_of(place, sizes[part], count)
            total[index, lo:hi] += gradient  # copies of kv heads add up, as the edge's all-reduce does
    return result, sums


def compare(found: Results, wanted: Results, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    for gradient, right in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(gradient, right, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [*SIZES, *COPIES])
def test_ring_attention_is_attention_over_whole_documents(name: str, lengths: tuple[int, ...]) -> None:
    compare(in_parts(lengths, (SIZES | COPIES)[name]), whole(lengths))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 1, 1, 1), (4, 4), (1,) * 8], ids=str)
def test_ulysses_is_attention_over_whole_documents(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    compare(in_parts(lengths, sizes, "ulysses"), whole(lengths))


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_bf16_stays_close_to_fp32(mode: str) -> None:
    result, gradients = in_parts((33, 7, 24), (1, 1, 1, 1), mode, torch.bfloat16)
    wanted = whole((33, 7, 24))
    compare((result.float(), [gradient.float() for gradient in gradients]), wanted, 3e-2)


def test_only_rows_that_the_receiver_can_see_travel_once_each_way() -> None:
    mail = Mail()
    in_parts((32,), (1, 1), mail=mail)
    row = 2 * KV_HEADS * K
    # Part 0 has the first and the last quarter: part 1 sees its first; both of part 1's lie before its last.
    assert mail.elements[0, 1, KEYS_TAG] == 2 * 8 * row, "in the forward and again in the backward pass"
    assert mail.elements[1, 0, KEYS_TAG] == 2 * 16 * row
    assert mail.elements[1, 0, GRADIENTS_TAG] == 8 * row
    assert mail.elements[0, 1, GRADIENTS_TAG] == 16 * row
