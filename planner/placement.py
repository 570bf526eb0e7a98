"""Ranks for a plan's blocks: inside nodes where they fit, neighbours in a pipeline in one node (paper A.1)."""

from collections.abc import Mapping, Sequence

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.problem import Block

PIPELINE, REPLICA = "pipeline", "replica"
Place = tuple[int, int]
"""Pipeline and stage."""


def place(
    cluster: Cluster,
    pipelines: Sequence[Sequence[Block]],
    taken: Mapping[Place, tuple[int, ...]] | None = None,
    together: str = PIPELINE,
) -> dict[Place, tuple[int, ...]] | None:
    """The ranks of every stage, or None where they do not fit; `taken` are stages that keep the ranks they have.

    Large blocks first, so that small ones never stand in their way; each beside its neighbour where that node has room,
    else in the fullest node that has. Neighbours are stages of one `pipeline`, which exchange activations, or the same
    stages of other pipelines, the `replica`s, which exchange gradients.
    """
    taken = dict(taken or {})
    free: dict[tuple[str, int], list[int]] = {}
    used = {rank for ranks in taken.values() for rank in ranks}
    sizes: dict[tuple[str, int], int] = {}
    for device in cluster.devices:
        site = (device.kind, device.node)
        sizes[site] = sizes.get(site, 0) + 1
        if device.rank not in used:
            free.setdefault(site, []).append(device.rank)
    found: dict[Place, tuple[int, ...]] = dict(taken)
    home: dict[Place, int] = {key: cluster.node_of(ranks[0]) for key, ranks in taken.items()}
    places = [(p, s) for p, blocks in enumerate(pipelines) for s in range(len(blocks))]
    places = [key for key in places if key not in taken]
    order = (lambda key: key) if together == PIPELINE else (lambda key: key[::-1])
    for p, s in sorted(places, key=lambda key: (-pipelines[key[0]][key[1]].ranks, order(key))):
        block = pipelines[p][s]
        if block.spread:
            ranks = _whole_nodes(block, free, sizes)
        else:
            around = [(p, s - 1), (p, s + 1)]
            if together == REPLICA:
                around = [(q, s) for q in range(len(pipelines))]
            near = [home[q] for q in around if q in home]
            ranks = _inside(block, free, near)
        if ranks is None:
            return None
        found[p, s] = ranks
        home[p, s] = cluster.node_of(ranks[-1])
    return found


def _inside(
    block: Block, free: dict[tuple[str, int], list[int]], near: Sequence[int]
) -> tuple[int, ...] | None:
    sites = [site for site, own in free.items() if site[0] == block.kind and len(own) >= block.ranks]
    if not sites:
        return None
    site = min(sites, key=lambda site: (site[1] not in near, len(free[site]), site[1]))
    ranks = tuple(free[site][: block.ranks])
    del free[site][: block.ranks]
    return ranks


def _whole_nodes(
    block: Block, free: dict[tuple[str, int], list[int]], sizes: Mapping[tuple[str, int], int]
) -> tuple[int, ...] | None:
    ranks: list[int] = []
    for site in sorted(free):
        if site[0] == block.kind and len(free[site]) == sizes[site] and len(ranks) < block.ranks:
            if len(ranks) + sizes[site] > block.ranks:
                continue
            ranks += free[site]
            free[site] = []
    return tuple(ranks) if len(ranks) == block.ranks else None
