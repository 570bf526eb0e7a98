"""Batched send-receive: who owns and who needs each finest slice, and who sends it (paper §5.3, §7)."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, get_args

from hetero_megatron.annotation import Annotation, Region
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.boxes import join_boxes, numel
from hetero_megatron.comm.sender import Amount, Sender
from hetero_megatron.errors import ReshardError

Algorithm = Literal["naive", "unfused", "fused"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True, slots=True)
class Slice:
    """One row of a BSR table: a finest slice, the ranks that own it and the ranks that need it."""

    region: Region
    owners: tuple[int, ...]
    needers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BsrTensor:
    """A tensor to move: global shape, bytes per element, layout before and after."""

    name: str
    shape: tuple[int, ...]
    itemsize: Amount
    src: Annotation
    dst: Annotation


@dataclass(frozen=True, slots=True)
class BsrCopy:
    """`rank` already holds this region of tensor number `tensor`."""

    tensor: int
    rank: int
    region: Region


@dataclass(frozen=True, slots=True)
class BsrTransfer:
    """`src` sends this region of tensor number `tensor` to `dst`."""

    tensor: int
    src: int
    dst: int
    region: Region


@dataclass(frozen=True)
class BsrScheme:
    """Who keeps and who sends what, for several tensors at once."""

    tensors: tuple[BsrTensor, ...]
    copies: tuple[BsrCopy, ...]
    transfers: tuple[BsrTransfer, ...]

    def bytes_sent(self, cluster: Cluster) -> dict[int, dict[str, Amount]]:
        """Bytes sent by rank and link name; ranks that send nothing are absent."""
        sent: dict[int, dict[str, Amount]] = {}
        for transfer in self.transfers:
            tensor = self.tensors[transfer.tensor]
            by_link = sent.setdefault(transfer.src, {})
            link = cluster.link(transfer.src, transfer.dst).name
            by_link[link] = by_link.get(link, 0) + numel(transfer.region, tensor.shape) * tensor.itemsize
        return sent

    @cached_property
    def _messages(self) -> dict[tuple[int, int], tuple[tuple[int, Region], ...]]:
        found: dict[tuple[int, int], list[tuple[int, Region]]] = {}
        for transfer in self.transfers:
            found.setdefault((transfer.src, transfer.dst), []).append((transfer.tensor, transfer.region))
        return {pair: tuple(parts) for pair, parts in found.items()}

    def messages(self) -> dict[tuple[int, int], tuple[tuple[int, Region], ...]]:
        """One message per (sender, receiver): its (tensor number, region) parts in order."""
        return self._messages


@lru_cache(maxsize=65536)
def bsr_table(src: Annotation, dst: Annotation) -> tuple[Slice, ...]:
    """The finest slices of `src` -> `dst` in row-major order; nothing is cut that neither side cuts.

    Owners and needers stand in union order, then device index.

    Raises:
        ReshardError: either side is Partial.
    """
    for annotation in (src, dst):
        if annotation.has_partial:
            raise ReshardError(f"BSR moves whole values, but {annotation} is Partial: reduce it first")
    return slices(
        [(rank, src.region(rank)) for rank in src.ranks],
        [(rank, dst.region(rank)) for rank in dst.ranks],
    )


def slices(owned: Sequence[tuple[int, Region]], needed: Sequence[tuple[int, Region]]) -> tuple[Slice, ...]:
    """The BSR table of regions held before and after; only slices that somebody needs."""
    found: dict[int, set[Fraction]] = {}
    for region in {region for _, region in (*owned, *needed)}:
        for dim, lo, hi in region.cuts:
            found.setdefault(dim, set()).update((lo, hi))
    edges = {dim: sorted(cuts | {Fraction(0), Fraction(1)}) for dim, cuts in sorted(found.items())}
    needers = _by_cell(needed, edges)
    owners = _by_cell(owned, edges)
    return tuple(
        Slice(
            Region.of(
                {dim: (cuts[at], cuts[at + 1]) for (dim, cuts), at in zip(edges.items(), cell, strict=True)}
            ),
            tuple(owners.get(cell, ())),
            tuple(needers[cell]),
        )
        for cell in sorted(needers)
    )


def _by_cell(
    placed: Iterable[tuple[int, Region]], edges: dict[int, list[Fraction]]
) -> dict[tuple[int, ...], list[int]]:
    """Ranks by grid cell, where `edges` cut every dim; a region is looked up once for all its ranks."""
    cells_of: dict[Region, list[tuple[int, ...]]] = {}
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, region in placed:
        cells = cells_of.get(region)
        if cells is None:
            spans = []
            for dim, cuts in edges.items():
                lo, hi = region.span(dim)
                spans.append(range(bisect_left(cuts, lo), bisect_left(cuts, hi)))
            cells = cells_of[region] = list(product(*spans))
        for cell in cells:
            ranks.setdefault(cell, []).append(rank)
    return ranks


def assign(
    table: Sequence[Slice],
    weights: Sequence[Amount],
    sender: Sender,
    lost: frozenset[int] = frozenset(),
    name: str = "",
) -> Iterator[tuple[int, int, Region]]:
    """(sender, receiver, region) per slice and living needer; a needer that owns the slice sends to itself.

    Raises:
        ReshardError: no living rank owns a slice that a living rank needs.
    """
    for piece, weight in zip(table, weights, strict=True):
        needers = [rank for rank in piece.needers if rank not in lost] if lost else piece.needers
        if not needers or not weight:
            continue
        owners = [rank for rank in piece.owners if rank not in lost] if lost else piece.owners
        if not owners:
            raise ReshardError(
                f"{name or 'tensor'}: {piece.region} is needed by rank {needers[0]}, but every owner "
                f"{piece.owners} is lost: load it from a checkpoint"
            )
        choice = sender.among(owners)
        held = set(owners)
        for rank in needers:
            yield (rank if rank in held else choice.to(rank, weight)), rank, piece.region


def schedule_transfers(
    tensors: Sequence[BsrTensor],
    cluster: Cluster | None,
    algorithm: Algorithm = "fused",
    lost: frozenset[int] = frozenset(),
) -> BsrScheme:
    """Choose a sender for everything that must move; ranks in `lost` neither send nor receive.

    'naive' takes the smallest owner; 'unfused' prefers fast links and balances load inside each tensor;
    'fused' balances over all tensors together, in their order. A rank that owns a slice always keeps it.

    Raises:
        ReshardError: an unknown algorithm, a Partial tensor, or a slice whose owners are all lost.
    """
    if algorithm not in ALGORITHMS:
        raise ReshardError(f"BSR algorithm {algorithm!r} is unknown; known: {', '.join(ALGORITHMS)}")
    copies: list[BsrCopy] = []
    transfers: list[BsrTransfer] = []
    sender = Sender(cluster, balanced=algorithm != "naive")
    for number, tensor in enumerate(tensors):
        if algorithm == "unfused":
            sender = Sender(cluster, balanced=True)
        table = bsr_table(tensor.src, tensor.dst)
        weights = [count * tensor.itemsize for count in _counts(tensor.src, tensor.dst, tensor.shape)]
        moved = assign(table, weights, sender, lost, tensor.name)
        for (src, dst), region in join_boxes(((src, dst), region) for src, dst, region in moved):
            if src == dst:
                copies.append(BsrCopy(number, dst, region))
            else:
                transfers.append(BsrTransfer(number, src, dst, region))
    return BsrScheme(tuple(tensors), tuple(copies), tuple(transfers))


@lru_cache(maxsize=65536)
def _counts(src: Annotation, dst: Annotation, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(numel(piece.region, shape) for piece in bsr_table(src, dst))
