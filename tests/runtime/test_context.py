"""Who takes which tokens of a micro-batch: nothing lost, zigzag, balanced; and which pairs of tokens meet."""

import random
from itertools import pairwise

import pytest
import torch

from hetero_megatron.runtime.batch import IGNORE
from hetero_megatron.runtime.context import ContextLayout, ContextShare, Pairs, Part, Rows, share
from tests.distributed.training import micro_batch, sequences

SHARES = ((1, 1), (2, 1), (1, 3), (1, 1, 1), (3, 2, 1), (1, 1, 1, 1))


def borders(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *(sum(lengths[: at + 1]) for at in range(len(lengths))))


def some_lengths(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choice((0, 1, 1, 2, 3, 7, 16, 33, 64)) for _ in range(rng.randint(1, 12)))


def work(parts: tuple[Part, ...], cu_seqlens: tuple[int, ...]) -> list[int]:
    """Query-key pairs of each part's queries."""
    seen = [at - start + 1 for start, end in pairwise(cu_seqlens) for at in range(start, end)]
    return [sum(seen[token] for token in part.index.tolist()) for part in parts]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_on_one_part_in_document_order(shares: tuple[int, ...], seed: int) -> None:
    cu_seqlens = borders(some_lengths(seed))
    multiples = (4, 1, 2, 3)[: len(shares)]
    parts = share(cu_seqlens, shares, multiples)
    assert sorted(token for part in parts for token in part.index.tolist()) == list(range(cu_seqlens[-1]))
    for part, multiple in zip(parts, multiples, strict=True):
        assert part.index.tolist() == sorted(part.index.tolist())
        assert [chunk.offset for chunk in part.chunks] == [
            sum(c.end - c.start for c in part.chunks[:at]) for at in range(len(part.chunks))
        ]
        assert part.tokens > 0
        assert part.tokens % multiple == 0
        assert part.tokens - part.real < multiple or not part.real
    assert share(cu_seqlens, shares, multiples) == parts, "deterministic"


def test_a_document_is_cut_in_zigzag_chunks_by_share() -> None:
    parts = share((0, 24), (2, 1), (1, 1))
    assert [[(c.place, c.start, c.end) for c in part.chunks] for part in parts] == [
        [(0, 0, 8), (3, 16, 24)],
        [(1, 8, 12), (2, 12, 16)],
    ]
    assert parts[0].documents() == {0: (0, 16)}


def test_odd_tokens_go_round_so_that_running_totals_stay_balanced() -> None:
    assert [part.real for part in share(borders((1,) * 6), (1, 1), (1, 1))] == [3, 3]
    assert [part.real for part in share(borders((7, 5, 3, 1)), (1, 1), (1, 1))] == [8, 8]
    assert [part.real for part in share(borders((1,) * 9), (2, 1), (1, 1))] == [6, 3]
    assert [part.tokens for part in share((0, 1), (1, 1, 1), (2, 2, 1))] == [2, 2, 1], "never no token"


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("lengths", [(4096,), (1023, 777, 2296), (37,) * 64, (2,) * 500, (1, 2, 3, 16) * 60])
def test_causal_work_follows_the_shares(shares: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    cu_seqlens = borders(lengths)
    found = work(share(cu_seqlens, shares, (1,) * len(shares)), cu_seqlens)
    for done, weight in zip(found, shares, strict=True):
        assert done == pytest.approx(sum(found) * weight / sum(shares), rel=0.04), found


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("seed", range(6))
def test_every_causal_pair_of_a_document_meets_exactly_once(shares: tuple[int, ...], seed: int) -> None:
    cu_seqlens = borders(some_lengths(seed))
    parts = share(cu_seqlens, shares, (1,) * len(shares))
    met: list[tuple[int, int]] = []
    for number in range(len(shares)):
        context = _context(cu_seqlens, number, shares)
        for other, pairs in enumerate(context.sees):
            met += _meetings(pairs, parts[number], parts[other], causal=other == number)
            back = _context(cu_seqlens, other, shares).seen_by[number]
            assert _numbers(back.k_rows) == _numbers(pairs.k_rows), "both sides agree on the rows sent"
    wanted = [(q, k) for lo, hi in pairwise(cu_seqlens) for q in range(lo, hi) for k in range(lo, q + 1)]
    assert sorted(met) == wanted


def _context(cu_seqlens: tuple[int, ...], part: int, shares: tuple[int, ...]) -> ContextShare:
    documents = [d[: hi - lo] for d, (lo, hi) in zip(sequences(12, 64), pairwise(cu_seqlens), strict=False)]
    batch = micro_batch([document for document in documents if document])
    context = ContextLayout(part, shares, (1,) * len(shares)).cut(batch).segments.context
    assert context is not None
    return context


def _numbers(rows: Rows) -> list[int]:
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def _meetings(pairs: Pairs, queries: Part, keys: Part, causal: bool) -> list[tuple[int, int]]:
    q_index, k_index = queries.index.tolist(), keys.index.tolist()
    q_rows, k_rows = _numbers(pairs.q_rows), _numbers(pairs.k_rows)
    assert (len(q_rows), len(k_rows)) == (pairs.queries, pairs.keys)
    found, q_at, k_at = [], 0, 0
    for blocks, q_length, k_length in pairs.runs:
        for _ in range(blocks):
            for i in range(q_length):
                for j in range(i + 1 if causal else k_length):
                    found.append((q_index[q_rows[q_at + i]], k_index[k_rows[k_at + j]]))
            q_at, k_at = q_at + q_length, k_at + k_length
    assert pairs.q_borders[-1] == q_at
    assert pairs.k_borders[-1] == k_at
    return found


def test_equal_documents_are_one_run_of_blocks() -> None:
    context = _context(borders((16,) * 8), 0, (1, 1))
    assert [pairs.runs for pairs in context.sees] == [((8, 8, 8),), ((8, 4, 8),)]


def test_a_part_holds_its_own_tokens_targets_and_positions_and_pads_without_target() -> None:
    batch = micro_batch([document[:n] for document, n in zip(sequences(2), (7, 4), strict=True)])
    own = ContextLayout(1, (1, 1), (4, 4)).cut(batch)
    index = share((0, 7, 11), (1, 1), (4, 4))[1].index.tolist()
    padding = [0] * (-len(index) % 4)
    assert padding
    assert own.tokens_T.tolist() == batch.tokens_T[index].tolist() + padding
    assert own.targets_T.tolist() == batch.targets_T[index].tolist() + [IGNORE] * len(padding)
    assert own.segments.positions_T.tolist() == batch.segments.positions_T[index].tolist() + padding
    assert own.segments.tokens == own.tokens_T.numel() == 8
    assert own.segments.cu_seqlens == (0, 3, 5, 8)
    others = ContextLayout(0, (1, 1), (4, 4)).cut(batch)
    assert own.valid_tokens + others.valid_tokens == batch.valid_tokens == 9
    context = own.segments.context
    assert context is not None
    joined = torch.cat([others.tokens_T, own.tokens_T])
    assert torch.equal(joined[context.places], batch.tokens_T), "places undo the parts' order"
