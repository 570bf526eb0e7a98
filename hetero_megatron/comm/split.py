"""Top-tier collectives across subgroups: SplitAR, SplitRS and SplitAG (paper §5.2, Figures 9 and 10)."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import lcm, prod

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, Region
from hetero_megatron.comm.boxes import join_boxes
from hetero_megatron.comm.steps import Collective, CollectiveKind, Phase, Stage, Step, Transfer

_KINDS: dict[CollectiveKind, str] = {"all_reduce": "AR", "reduce_scatter": "RS", "all_gather": "AG"}


def splits_exactly(annotation: Annotation, dim: int) -> bool:
    """Whether SplitRS to, or SplitAG from, hdim `dim` is exact: no subgroup may split `dim` itself."""
    return all(states.parts(dim) == 1 for states in annotation.states)


def split_collective(before: Annotation, after: Annotation) -> Phase:
    """Move hdim -2 to -1 (SplitAR) or d (SplitRS), or d to -1 (SplitAG), with groups and states unchanged.

    The tensor is cut into the least common multiple of the subgroups' cuts, and every slice is communicated
    once, by one holder per subgroup; other copies get the result from that holder in an in-place stage.
    When all subgroups hold equally many copies, the j-th copies form a group of their own instead, unless these
    groups would add in different orders. When all subgroups have the same states a slice is a whole shard and the
    operator is the plain AR, RS or AG.
    """
    kind, dim = _kind(before.hdim, after.hdim)
    slices = _slices(before)
    found: list[tuple[tuple[int, ...], Region]] = []
    handed: list[tuple[tuple[int, int], Region]] = []
    copies = {states.parts(DUPLICATE) for states in before.states}
    for region, holders in slices:
        if len(copies) == 1:
            groups = list(zip(*(held for held, _ in holders), strict=True))
            if kind == "all_gather" or _add_alike(groups):
                found += [(ranks, region) for ranks in groups]
                continue
        chosen = tuple(held[place] for held, place in holders)
        found.append((chosen, region))
        for subgroup, (held, _) in enumerate(holders):
            result = (
                region if dim is None or kind == "all_gather" else region.cut(dim, subgroup, before.hsize)
            )
            handed += [((chosen[subgroup], rank), result) for rank in held if rank != chosen[subgroup]]
    steps: list[Step] = [Collective(kind, ranks, region, dim) for ranks, region in join_boxes(found)]
    stages = [Stage(after, tuple(steps), in_place=kind == "all_reduce")]
    if handed:
        stages.append(
            Stage(
                after, tuple(Transfer(a, b, region) for (a, b), region in join_boxes(handed)), in_place=True
            )
        )
    uniform = len(set(before.states)) == 1
    return (("" if uniform else "Split") + _KINDS[kind],) * before.hsize, tuple(stages)


def _add_alike(groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether all groups add their members' terms in one order, so that copies of a sum are equal to the last bit.

    Libraries add in ascending order of ranks, or start somewhere in that circle; of two terms every order is one.
    """
    orders = {tuple(sorted(range(len(ranks)), key=ranks.__getitem__)) for ranks in groups}
    return len(orders) == 1 or len(groups[0]) <= 2


def _kind(hdim: int, to_hdim: int) -> tuple[CollectiveKind, int | None]:
    if hdim == PARTIAL:
        return ("all_reduce", None) if to_hdim == DUPLICATE else ("reduce_scatter", to_hdim)
    assert to_hdim == DUPLICATE, f"no Split collective turns hdim {hdim} into {to_hdim}"
    return "all_gather", hdim


def _slices(annotation: Annotation) -> Iterator[tuple[Region, list[tuple[list[int], int]]]]:
    """Finest slices in row-major order; per subgroup, its ranks and the place of the working one.

    The slices of one shard are dealt to its copies in equal runs, so that neighbours meet the same partners.
    """
    dims = sorted({dim for states in annotation.states for dim in states.split_dims})
    cuts = [lcm(*(states.parts(dim) for states in annotation.states)) for dim in dims]
    parts = [[states.parts(dim) for dim in dims] for states in annotation.states]
    holders: list[dict[tuple[int, ...], list[int]]] = []
    for group, states in zip(annotation.groups, annotation.states, strict=True):
        held: dict[tuple[int, ...], list[int]] = {}
        for index, rank in enumerate(group):
            coord = states.coord(index)
            held.setdefault(tuple(coord.get(dim, 0) for dim in dims), []).append(rank)
        holders.append(held)
    for cell in product(*map(range, cuts)):
        spans = {d: (Fraction(k, n), Fraction(k + 1, n)) for d, k, n in zip(dims, cell, cuts, strict=True)}
        row: list[tuple[list[int], int]] = []
        for own, held in zip(parts, holders, strict=True):
            widths = [n // p for n, p in zip(cuts, own, strict=True)]
            ranks = held[tuple(k // width for k, width in zip(cell, widths, strict=True))]
            inner = 0
            for k, width in zip(cell, widths, strict=True):
                inner = inner * width + k % width
            row.append((ranks, inner * len(ranks) // prod(widths)))
        yield Region.of(spans), row
