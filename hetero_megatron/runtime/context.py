"""Context parallelism: which tokens of a micro-batch each part takes, and which pairs of them meet (paper Figure 4).

Every document is cut into 2n consecutive chunks and part p of n takes chunks p and 2n-1-p (zigzag). A late chunk
looks at many keys and an early one at few, so that causal work follows the parts' shares. Nothing here communicates.

Shape legend: `T` packed tokens of the micro-batch, or of one part where a name says `local`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from hetero_megatron.runtime.batch import IGNORE, PAD, MicroBatch, Segments, on_device

Rows = slice | Tensor
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one document.

    Attributes:
        place: number among the document's 2n chunks.
        start, end: where it lies in the packed order.
        offset: where its first token lies in its part.
    """

    document: int
    place: int
    start: int
    end: int
    offset: int

    @property
    def local_end(self) -> int:
        """Where it ends in its part."""
        return self.offset + self.end - self.start


def _numbers(spans: Sequence[Span]) -> Tensor:
    """The numbers of all spans, one span after the other."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(lo, hi) for lo, hi in spans)])


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one context-parallel part: its chunks that are not empty, in order, then padding."""

    chunks: tuple[Chunk, ...]
    tokens: int

    @property
    def real(self) -> int:
        """Number of tokens without padding."""
        return self.chunks[-1].local_end if self.chunks else 0

    @property
    def index(self) -> Tensor:
        """Place in the packed order of every real token."""
        return _numbers([(chunk.start, chunk.end) for chunk in self.chunks])

    def documents(self) -> dict[int, Span]:
        """Local rows of each document that has any here."""
        spans: dict[int, Span] = {}
        for chunk in self.chunks:
            first = spans.get(chunk.document, (chunk.offset, 0))[0]
            spans[chunk.document] = (first, chunk.local_end)
        return spans

    def chunks_at(self, places: range) -> dict[int, Span]:
        """Local rows of each document's chunk with a place in `places`; a part has at most one there."""
        return {c.document: (c.offset, c.local_end) for c in self.chunks if c.place in places}


def share(cu_seqlens: Sequence[int], shares: Sequence[int], multiples: Sequence[int]) -> tuple[Part, ...]:
    """Who takes which tokens: chunks of every document in proportion to `shares`, padded to `multiples`.

    Tokens that do not divide go to the part whose running total is furthest behind its share; of a part's two
    chunks, the later one gets the odd token when the part's causal work so far is behind. Every part gets at
    least one unit of padding rather than no token at all, and no real token is left out.

    >>> [part.index.tolist() for part in share((0, 7), (1, 1), (1, 1))]
    [[0, 1, 5, 6], [2, 3, 4]]
    """
    count, whole = len(shares), sum(shares)
    taken, work, total, total_work = [0] * count, [0] * count, 0, 0
    chunks: list[list[Chunk]] = [[] for _ in shares]
    for document, (start, end) in enumerate(pairwise(cu_seqlens)):
        length = end - start
        if not length:
            continue
        total += length
        sizes = [length * weight // whole for weight in shares]
        for _ in range(length - sum(sizes)):
            behind = [total * w - (t + s) * whole for w, t, s in zip(shares, taken, sizes, strict=True)]
            sizes[behind.index(max(behind))] += 1
        late = [
            size - size // 2 if done * whole <= total_work * weight else size // 2
            for size, done, weight in zip(sizes, work, shares, strict=True)
        ]
        early = [size - after for size, after in zip(sizes, late, strict=True)]
        edges = list(accumulate([*early, *reversed(late)], initial=0))
        for place, (lo, hi) in enumerate(pairwise(edges)):
            part = min(place, 2 * count - 1 - place)
            if hi > lo:
                chunks[part].append(Chunk(document, place, start + lo, start + hi, taken[part]))
                taken[part] += hi - lo
                work[part] += (hi * (hi + 1) - lo * (lo + 1)) // 2
        total_work += length * (length + 1) // 2
    return tuple(
        Part(tuple(own), max(multiple, -(-tokens // multiple) * multiple))
        for own, tokens, multiple in zip(chunks, taken, multiples, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """What the queries of one part see of the keys of one part: per document a full or a causal block.

    Attributes:
        q_rows, k_rows: local rows of either part, blocks of equal size beside one another.
        runs: (blocks, queries, keys) of consecutive blocks of the same size.
        queries, keys: number of rows of all blocks.
        q_borders, k_borders: ends of the blocks, int32, for kernels that take all blocks at once.
    """

    q_rows: Rows
    k_rows: Rows
    runs: tuple[tuple[int, int, int], ...]
    queries: int
    keys: int
    q_borders: Tensor
    k_borders: Tensor


def visible(queries: Part, keys: Part, q_part: int, k_part: int, parts: int) -> list[tuple[Span, Span]]:
    """Local rows of the queries and keys that meet, document by document.

    An earlier part's early chunk lies before all of a later part's rows, and a later part's rows all lie before
    an earlier part's late chunk; inside one part the rows are in order. So every block is full, or causal
    in its own part, and needs no mask.
    """
    early, late = range(parts), range(parts, 2 * parts)
    ours = queries.chunks_at(late) if q_part < k_part else queries.documents()
    theirs = keys.chunks_at(early) if k_part < q_part else keys.documents()
    return [(span, theirs[document]) for document, span in ours.items() if document in theirs]


def _pairs(blocks: list[tuple[Span, Span]], device: torch.device) -> Pairs:
    def size(block: tuple[Span, Span]) -> tuple[int, int]:
        (q_lo, q_hi), (k_lo, k_hi) = block
        return q_hi - q_lo, k_hi - k_lo

    blocks = sorted(blocks, key=size)
    runs = tuple((len(list(same)), *lengths) for lengths, same in groupby(blocks, key=size))
    q_ends = list(accumulate((size(block)[0] for block in blocks), initial=0))
    k_ends = list(accumulate((size(block)[1] for block in blocks), initial=0))
    q_borders, k_borders = (
        on_device(torch.tensor(ends, dtype=torch.int32), device) for ends in (q_ends, k_ends)
    )
    q_rows, k_rows = (_rows([block[side] for block in blocks], device) for side in (0, 1))
    return Pairs(q_rows, k_rows, runs, q_ends[-1], k_ends[-1], q_borders, k_borders)


def _rows(spans: Sequence[Span], device: torch.device) -> Rows:
    """A slice where the spans are one run of rows, else their indices."""
    if not spans:
        return slice(0, 0)
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return on_device(_numbers(spans), device)


@dataclass(frozen=True, slots=True, eq=False)
class ContextShare:
    """What the attention of one part needs to know of a micro-batch, once for all layers.

    Attributes:
        part: the own part; `parts` has all of them.
        sees: by part, what the own queries see of its keys; the own entry is causal, the others are full.
        seen_by: by part, what its queries see of the own keys.
        whole: the documents' borders in the packed order.
        places: per packed token, its place when the parts' tokens stand one part after the other.
    """

    part: int
    parts: tuple[Part, ...]
    sees: tuple[Pairs, ...]
    seen_by: tuple[Pairs, ...]
    whole: Segments
    places: Tensor


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """How one part cuts its micro-batches: its number, all parts' shares, and what their tokens divide by."""

    part: int
    shares: tuple[int, ...]
    multiples: tuple[int, ...]

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """The part's own tokens, in local order; padding has no target and belongs to no document."""
        cut = _cut(batch.segments.cu_seqlens, self, batch.tokens_T.device)
        return MicroBatch(
            _taken(batch.tokens_T, cut, PAD),
            _taken(batch.targets_T, cut, IGNORE),
            Segments(_taken(batch.segments.positions_T, cut, 0), cut.cu_seqlens, cut.context),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    index: Tensor
    padding: int
    cu_seqlens: tuple[int, ...]
    context: ContextShare


def _taken(values_T: Tensor, cut: _Cut, filler: int) -> Tensor:
    return torch.cat([values_T[cut.index], values_T.new_full((cut.padding,), filler)])


@lru_cache(maxsize=64)
def _cut(cu_seqlens: tuple[int, ...], layout: ContextLayout, device: torch.device) -> _Cut:
    parts = share(cu_seqlens, layout.shares, layout.multiples)
    own, count = parts[layout.part], len(parts)
    others = list(enumerate(parts))
    sees = [_pairs(visible(own, part, layout.part, at, count), device) for at, part in others]
    seen_by = [_pairs(visible(part, own, at, layout.part, count), device) for at, part in others]
    places = torch.empty(cu_seqlens[-1], dtype=torch.int64)
    first = 0
    for part in parts:
        places[part.index] = torch.arange(first, first + part.real)
        first += part.tokens
    whole = Segments.of_lengths(tuple(hi - lo for lo, hi in pairwise(cu_seqlens)), device)
    context = ContextShare(layout.part, parts, tuple(sees), tuple(seen_by), whole, on_device(places, device))
    ends = [0, *(end for _, end in own.documents().values())]
    padding = own.tokens - own.real
    return _Cut(
        on_device(own.index, device), padding, tuple(ends if not padding else [*ends, own.tokens]), context
    )
