"""Communication resolution: which operators turn one annotation into another (paper §5, Figure 7)."""

from collections.abc import Sequence
from functools import lru_cache

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.bottom import within
from hetero_megatron.comm.boxes import join_boxes
from hetero_megatron.comm.bsr import Slice, assign, slices
from hetero_megatron.comm.sender import Sender
from hetero_megatron.comm.split import split_collective, splits_exactly
from hetero_megatron.comm.steps import CommPlan, Copy, Phase, Step, Transfer, join_operators, one_stage
from hetero_megatron.errors import ReshardError


@lru_cache(maxsize=65536)
def resolve(src: Annotation, dst: Annotation, cluster: Cluster | None = None) -> CommPlan:
    """Communication that turns `src` into `dst`.

    Partial sums are reduced first: inside every subgroup (AR, RS), then across subgroups (SplitAR, SplitRS;
    plain AR, RS when all subgroups are alike). What is left is an Identity, a local cut ('Split'), SR, AG or
    SplitAG, and BSR where no collective fits. `cluster` lets BSR prefer fast links; without it all are equal.
    Pure: the same arguments give an equal plan on every rank.

    Raises:
        ReshardError: `dst` is Partial, other than by keeping the same Partial on the same ranks.

    >>> resolve(Annotation.on((0, 1), {-2: 2}), Annotation.on((0, 1), {-1: 2})).label
    'AR'
    """
    phases: list[Phase] = []
    if src != dst:
        if dst.has_partial:
            phases.append(_keep_partial(src, dst))
        else:
            at = src
            if src.has_partial:
                at = _reduced_inside(src, dst)
                phases.append(_inside(src, at, None))
                if src.hdim == PARTIAL:
                    exact = dst.hdim >= 0 and dst.hsize == src.hsize and splits_exactly(at, dst.hdim)
                    reduced = at.replace(hdim=dst.hdim if exact else DUPLICATE)
                    phases.append(split_collective(at, reduced))
                    at = reduced
            phases += _move(at, dst, cluster)
    return CommPlan(
        src, dst, tuple(stage for _, stages in phases for stage in stages), _operators(phases, dst.hsize)
    )


def _operators(phases: Sequence[Phase], hsize: int) -> tuple[str, ...]:
    """Per subgroup, the names of what it does in turn; 'Identity' only where it does nothing at all."""
    if any(len(names) != hsize for names, _ in phases):
        joined = [(join_operators(names), stages) for names, stages in phases]
        phases = [((f"({name})" if "|" in name else name,) * hsize, stages) for name, stages in joined]
    rows = [
        [names[subgroup] for names, _ in phases if names[subgroup] != "Identity"] for subgroup in range(hsize)
    ]
    return tuple("+".join(row) or "Identity" for row in rows)


def _keep_partial(src: Annotation, dst: Annotation) -> Phase:
    if src.hdim == dst.hdim and src.hsize == dst.hsize and (kept := _collectives(src, dst)) is not None:
        return kept
    raise ReshardError(
        f"cannot reshard {src} to {dst}: the destination is Partial, and only a source with the same Partial "
        "on the same ranks, changed by collectives alone, becomes that; reshard to Duplicate or Split"
    )


def _collectives(src: Annotation, dst: Annotation) -> Phase | None:
    """One operator inside every subgroup on its own ranks, or None."""
    names: list[str] = []
    steps: list[Step] = []
    for subgroup in range(src.hsize):
        found = within(
            src.groups[subgroup],
            src.states[subgroup],
            dst.groups[subgroup],
            dst.states[subgroup],
            src.subgroup_region(subgroup),
        )
        if found is None:
            return None
        names.append(found[0])
        steps += found[1]
    return tuple(names), one_stage(src, dst, steps)


def _reduced_inside(src: Annotation, dst: Annotation) -> Annotation:
    """`src` without bottom-tier Partial, as near to `dst` as one collective per subgroup gets."""
    reduced = [_reduced_subgroup(src, dst, subgroup) for subgroup in range(src.hsize)]
    return Annotation(tuple(group for group, _ in reduced), tuple(states for _, states in reduced), src.hdim)


def _reduced_subgroup(
    src: Annotation, dst: Annotation, subgroup: int
) -> tuple[DeviceGroup, DistributedStates]:
    group, states = src.groups[subgroup], src.states[subgroup]
    target = dst.states[subgroup if src.hsize == dst.hsize else 0]
    if src.hsize == dst.hsize and target.degree == states.degree:
        to_group = dst.groups[subgroup] if set(dst.groups[subgroup]) == set(group) else group
        found = within(group, states, to_group, target, src.subgroup_region(subgroup))
        if found is not None and found[0] in ("AR", "RS"):
            return to_group, target
        # A local cut before the top tier is reduced saves traffic; cutting hdim itself would lose rows.
        keeps_hdim = dst.hdim < 0 or target.parts(dst.hdim) == 1
        if found is not None and found[0] == "Split" and src.hdim == PARTIAL and keeps_hdim:
            return to_group, target
    if states.parts(PARTIAL) == 1:
        return group, states
    scatter = next((dim for dim in target.split_dims if states.parts(dim) == 1), None)
    if scatter is not None or states.parts(DUPLICATE) == 1:
        new = DUPLICATE if scatter is None else scatter
        return group, DistributedStates(tuple((new if dim == PARTIAL else dim, n) for dim, n in states.order))
    # Two runs of copies that may not be neighbours in the order: list the ranks shard by shard instead.
    splits = tuple((dim, parts) for dim, parts in states.order if dim >= 0)
    coords = {rank: states.coord(index) for index, rank in enumerate(group)}
    ranks = sorted(group, key=lambda rank: [coords[rank][dim] for dim, _ in splits])
    copies = states.parts(PARTIAL) * states.parts(DUPLICATE)
    return DeviceGroup(tuple(ranks)), DistributedStates((*splits, (DUPLICATE, copies)))


def _move(src: Annotation, dst: Annotation, cluster: Cluster | None) -> list[Phase]:
    """Phases from `src` to `dst`, neither of them Partial: local, inside subgroups, SplitAG, else one BSR."""
    if src == dst:
        return []
    if (local := _local(src, dst)) is not None:
        return [local]
    if src.hsize == dst.hsize and src.hdim == dst.hdim:
        return [_inside(src, dst, cluster)]
    if src.hsize == dst.hsize and src.hdim >= 0 and dst.hdim == DUPLICATE and splits_exactly(dst, src.hdim):
        aligned = dst.replace(hdim=src.hdim)
        inside = _collectives(src, aligned)
        if inside is not None:
            return [inside, split_collective(aligned, dst)]
    table = slices([(r, src.region(r)) for r in src.ranks], [(r, dst.region(r)) for r in dst.ranks])
    return [(("BSR",) * dst.hsize, one_stage(src, dst, _batched(table, Sender(cluster))))]


def _local(src: Annotation, dst: Annotation) -> Phase | None:
    """Every rank already holds what it needs: Identity, or a local cut."""
    names: list[str] = []
    for group in dst.groups:
        if not all(_holds(src, dst, rank) for rank in group):
            return None
        names.append("Identity" if all(src.region(rank) == dst.region(rank) for rank in group) else "Split")
    return tuple(names), one_stage(src, dst, [Copy(rank, dst.region(rank)) for rank in dst.ranks])


def _holds(src: Annotation, dst: Annotation, rank: int) -> bool:
    return src.subgroup_of(rank) is not None and src.region(rank).contains(dst.region(rank))


def _inside(src: Annotation, dst: Annotation, cluster: Cluster | None) -> Phase:
    """Every subgroup on its own: a collective when its ranks stay, SR when only they change, else BSR."""
    if (found := _collectives(src, dst)) is not None:
        return found
    names: list[str] = []
    steps: list[Step] = []
    sender = Sender(cluster)
    for subgroup, (group, to_group) in enumerate(zip(src.groups, dst.groups, strict=True)):
        states, to_states = src.states[subgroup], dst.states[subgroup]
        held = [_holds(src, dst, rank) for rank in to_group]
        if all(held):
            same = all(src.region(rank) == dst.region(rank) for rank in to_group)
            names.append("Identity" if same else "Split")
            steps += [Copy(rank, dst.region(rank)) for rank in to_group]
        elif (one := within(group, states, to_group, to_states, src.subgroup_region(subgroup))) is not None:
            names.append(one[0])
            steps += one[1]
        elif states == to_states:
            names.append("SR")
            for own, sends, rank in zip(held, group, to_group, strict=True):
                region = dst.region(rank)
                steps.append(Copy(rank, region) if own else Transfer(sends, rank, region))
        else:
            names.append("BSR")
            owners = [*group, *(r for r in to_group if r not in group and src.subgroup_of(r) is not None)]
            table = slices([(r, src.region(r)) for r in owners], [(r, dst.region(r)) for r in to_group])
            steps += _batched(table, sender)
    return tuple(names), one_stage(src, dst, steps)


def _batched(table: Sequence[Slice], sender: Sender) -> list[Step]:
    moved = assign(table, [piece.region.volume() for piece in table], sender)
    return [
        Copy(dst, region) if src == dst else Transfer(src, dst, region)
        for (src, dst), region in join_boxes(((src, dst), region) for src, dst, region in moved)
    ]
