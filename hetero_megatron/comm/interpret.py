"""The numpy oracle: carries out a CommPlan on the shards of all ranks in one process (paper §5)."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hetero_megatron.annotation import PARTIAL, Annotation, Region
from hetero_megatron.annotation.region import Bounds
from hetero_megatron.comm.steps import Collective, CommPlan, Copy, Stage
from hetero_megatron.errors import ReshardError

Array = npt.NDArray[np.float64]


def shard(annotation: Annotation, full: Array, seed: int = 0) -> dict[int, Array]:
    """The shard of every rank. Partial tiers hold random whole addends of `full`, alike on all copies."""
    random = np.random.default_rng(seed)
    shards: dict[int, Array] = {}
    across = _addends(full, annotation.hsize if annotation.hdim == PARTIAL else 1, random)
    for subgroup, (group, states) in enumerate(zip(annotation.groups, annotation.states, strict=True)):
        inside = _addends(across[subgroup % len(across)], states.parts(PARTIAL), random)
        for index, rank in enumerate(group):
            held = inside[states.coord(index).get(PARTIAL, 0)]
            shards[rank] = held[_window(annotation.region(rank).bounds(full.shape))].copy()
    return shards


def assemble(annotation: Annotation, shards: Mapping[int, Array], shape: tuple[int, ...]) -> Array:
    """The whole tensor from the shards of all ranks; the inverse of `shard`.

    Raises:
        ReshardError: two ranks that should hold copies disagree.
    """
    _check(annotation, shards, shape)
    full = np.zeros(shape)
    first: dict[tuple[int, int, Region], int] = {}
    for subgroup, (group, states) in enumerate(zip(annotation.groups, annotation.states, strict=True)):
        tier = 0 if annotation.hdim == -1 else subgroup
        for index, rank in enumerate(group):
            region = annotation.region(rank)
            key = (subgroup, states.coord(index).get(PARTIAL, 0), region)
            if key in first:
                if not np.array_equal(shards[first[key]], shards[rank]):
                    raise ReshardError(
                        f"ranks {first[key]} and {rank} should hold equal copies of {region}, but differ"
                    )
                continue
            first[key] = rank
            if tier == subgroup:
                full[_window(region.bounds(shape))] += shards[rank]
        if tier != subgroup:
            alone = Annotation((group,), (states,))
            if not np.array_equal(full, assemble(alone, {rank: shards[rank] for rank in group}, shape)):
                raise ReshardError(f"subgroups 0 and {subgroup} should hold the same tensor, but differ")
    return full


def interpret(plan: CommPlan, shards: Mapping[int, Array], shape: tuple[int, ...]) -> dict[int, Array]:
    """The shards of `plan.dst` that the plan makes from those of `plan.src`; `shape` is the global shape.

    What no step writes is NaN.

    Raises:
        ReshardError: a source shard is missing or has the wrong shape.
    """
    _check(plan.src, shards, shape)
    before, now = plan.src, dict(shards)
    for stage in plan.stages:
        now = _run(stage, before, now, shape)
        before = stage.after
    return {rank: now[rank] for rank in plan.dst.ranks}


def _run(
    stage: Stage, before: Annotation, held: Mapping[int, Array], shape: tuple[int, ...]
) -> dict[int, Array]:
    after = stage.after
    made = {
        rank: held[rank].copy()
        if stage.in_place
        else np.full([hi - lo for lo, hi in after.region(rank).bounds(shape)], np.nan)
        for rank in after.ranks
    }

    def read(rank: int, region: Region) -> Array:
        return held[rank][_window(region.bounds(shape), before.region(rank).bounds(shape))]

    def write(rank: int, region: Region, value: Array) -> None:
        made[rank][_window(region.bounds(shape), after.region(rank).bounds(shape))] = value

    for step in stage.steps:
        if isinstance(step, Collective):
            if step.kind == "all_gather":
                for sender in step.ranks:
                    value = read(sender, step.piece(sender))
                    for rank in step.ranks:
                        write(rank, step.piece(sender), value)
                continue
            total = np.sum([read(rank, step.region) for rank in step.ranks], axis=0)
            whole = step.region.bounds(shape)
            for rank in step.ranks:
                write(rank, step.piece(rank), total[_window(step.piece(rank).bounds(shape), whole)])
        elif isinstance(step, Copy):
            write(step.rank, step.region, read(step.rank, step.region))
        else:
            write(step.dst, step.region, read(step.src, step.region))
    return made


def _addends(full: Array, count: int, random: np.random.Generator) -> list[Array]:
    """`count` arrays of whole numbers that sum to `full`."""
    others = [random.integers(-50, 50, full.shape).astype(np.float64) for _ in range(count - 1)]
    return [full - sum(others, np.zeros(full.shape)), *others]


def _window(bounds: Bounds, origin: Bounds | None = None) -> tuple[slice, ...]:
    """Global `bounds` as slices of an array that starts at `origin`."""
    if origin is None:
        return tuple(slice(lo, hi) for lo, hi in bounds)
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(bounds, origin, strict=True))


def _check(annotation: Annotation, shards: Mapping[int, Array], shape: tuple[int, ...]) -> None:
    for rank in annotation.ranks:
        if rank not in shards:
            raise ReshardError(f"rank {rank} has no shard of {annotation}")
        wanted = tuple(hi - lo for lo, hi in annotation.region(rank).bounds(shape))
        if shards[rank].shape != wanted:
            raise ReshardError(
                f"rank {rank} has a shard of shape {shards[rank].shape}, its region of {shape} is {wanted}"
            )
