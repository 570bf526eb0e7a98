"""Bottom tier: AR, RS, AG or a local cut inside one subgroup whose ranks stay (paper §5.1, Figure 8)."""

from functools import lru_cache

from hetero_megatron.annotation import PARTIAL, DeviceGroup, DistributedStates, Region
from hetero_megatron.comm.steps import Collective, Copy, Step

Found = tuple[str, tuple[Step, ...]]


def within(
    group: DeviceGroup,
    states: DistributedStates,
    to_group: DeviceGroup,
    to_states: DistributedStates,
    inside: Region,
) -> Found | None:
    """The one operator that turns `states` on `group` into `to_states` on the same ranks, or None.

    `inside` is what the subgroup holds as a whole; regions are global. 'Split' is a local cut. A Partial that
    both sides share stays untouched. `to_group` may list the ranks in another order.
    """
    if group == to_group:
        order = tuple(range(len(group)))
    elif len(group) == len(to_group) and set(group) == set(to_group):
        order = tuple(to_group.index(rank) for rank in group)
    else:
        return None
    if (found := _by_index(states, to_states, order, inside)) is None:
        return None
    return found[0], tuple(_on(step, group.ranks) for step in found[1])


def _on(step: Step, ranks: tuple[int, ...]) -> Step:
    """A step over device indices as a step over ranks."""
    if isinstance(step, Collective):
        return Collective(step.kind, tuple(ranks[index] for index in step.ranks), step.region, step.dim)
    assert isinstance(step, Copy), f"{step} moves data, but one operator inside a subgroup never sends"
    return Copy(ranks[step.rank], step.region)


@lru_cache(maxsize=65536)
def _by_index(
    states: DistributedStates, to_states: DistributedStates, order: tuple[int, ...], inside: Region
) -> Found | None:
    before = [states.region(index, inside) for index in range(states.degree)]
    after = [to_states.region(index, inside) for index in order]
    partial = [states.coord(index).get(PARTIAL, 0) for index in range(states.degree)]
    if to_states.parts(PARTIAL) == 1 < states.parts(PARTIAL):
        return _reduce(states, to_states, before, after)
    if states.parts(PARTIAL) != to_states.parts(PARTIAL):
        return None
    if partial != [to_states.coord(index).get(PARTIAL, 0) for index in order]:
        return None
    if all(mine.contains(wanted) for mine, wanted in zip(before, after, strict=True)):
        name = "Identity" if before == after else "Split"
        return name, tuple(Copy(index, region) for index, region in enumerate(after))
    return _gather(states, to_states, before, after, partial)


def _reduce(
    states: DistributedStates, to_states: DistributedStates, before: list[Region], after: list[Region]
) -> Found | None:
    """AR or RS over the ranks that differ in nothing but their Partial coord."""
    addends: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for index in range(states.degree):
        rest = tuple(item for item in states.coord(index).items() if item[0] != PARTIAL)
        addends.setdefault(rest, []).append(index)
    groups = list(addends.values())
    if before == after:
        return "AR", tuple(Collective("all_reduce", tuple(group), before[group[0]]) for group in groups)
    for dim in to_states.split_dims:
        steps: list[Step] = []
        for group in groups:
            holder = {after[index]: index for index in group}
            ranks = [holder.get(before[group[0]].cut(dim, place, len(group))) for place in range(len(group))]
            if None in ranks:
                break
            steps.append(
                Collective("reduce_scatter", tuple(r for r in ranks if r is not None), before[group[0]], dim)
            )
        else:
            return "RS", tuple(steps)
    return None


def _gather(
    states: DistributedStates,
    to_states: DistributedStates,
    before: list[Region],
    after: list[Region],
    partial: list[int],
) -> Found | None:
    """AG along one dim: ranks with the same destination hold its equal pieces, each piece equally often."""
    members: dict[tuple[int, Region], dict[Region, list[int]]] = {}
    for index, (mine, wanted) in enumerate(zip(before, after, strict=True)):
        members.setdefault((partial[index], wanted), {}).setdefault(mine, []).append(index)
    for dim in states.split_dims:
        parts = states.parts(dim) // to_states.parts(dim)
        steps: list[Step] = []
        for (_, wanted), held in members.items():
            pieces = (
                [held.get(wanted.cut(dim, place, parts), []) for place in range(parts)] if parts > 1 else []
            )
            copies = len(pieces[0]) if pieces else 0
            if not copies or len(pieces) != len(held) or any(len(piece) != copies for piece in pieces):
                break
            steps += [Collective("all_gather", ranks, wanted, dim) for ranks in zip(*pieces, strict=True)]
        else:
            return "AG", tuple(steps)
    return None
