"""Every pair of annotations that resolves ends exactly on the destination (numpy oracle, random by seed)."""

import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from hetero_megatron.annotation import PARTIAL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import Collective, CommPlan, Copy, Transfer, assemble, interpret, resolve, shard
from hetero_megatron.errors import ReshardError

SHAPES = ((97, 7), (12, 24), (7, 97), (48, 36), (5, 3), (24, 1))
PAIRS = 3600
DEGREES: dict[int, list[tuple[int, ...]]] = {
    1: [()],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}


def states(rng: random.Random, degree: int, dims: tuple[int, ...]) -> DistributedStates:
    """Random states that cover `degree` devices with some of `dims`, in random order."""
    factors = [f for f in DEGREES[degree] if len(f) <= len(dims)]
    chosen = rng.choice(factors)
    return DistributedStates(tuple(zip(rng.sample(dims, len(chosen)), chosen, strict=True)))


def union(
    rng: random.Random, groups: tuple[DeviceGroup, ...], dims: tuple[int, ...], hdims: tuple[int, ...]
) -> Annotation:
    hdim = -1 if len(groups) == 1 else rng.choice(hdims)
    return Annotation(groups, tuple(states(rng, len(group), dims) for group in groups), hdim)


def groups_of(rng: random.Random, hsize: int, devices: int = 16) -> tuple[DeviceGroup, ...]:
    ranks = rng.sample(range(devices), devices)
    sizes = [rng.choice((1, 2, 3, 4, 4, 6, 8) if hsize <= 2 else (1, 2, 3, 4, 4)) for _ in range(hsize)]
    groups = []
    for size in sizes:
        groups.append(DeviceGroup(tuple(ranks[:size])))
        ranks = ranks[size:]
    return tuple(groups)


def moved_groups(rng: random.Random, groups: tuple[DeviceGroup, ...]) -> tuple[DeviceGroup, ...]:
    """Groups of the same sizes on other ranks."""
    ranks = rng.sample(range(16), 16)
    return tuple(DeviceGroup(tuple(ranks.pop() for _ in group)) for group in groups)


def anything(rng: random.Random) -> tuple[Annotation, Annotation]:
    return (
        union(rng, groups_of(rng, rng.randint(1, 4)), (-2, -1, 0, 1), (-2, -1, 0, 1)),
        union(rng, groups_of(rng, rng.randint(1, 4)), (-1, 0, 1), (-1, 0, 1)),
    )


def same_groups(rng: random.Random) -> tuple[Annotation, Annotation]:
    groups = groups_of(rng, rng.randint(1, 4))
    return union(rng, groups, (-2, -1, 0, 1), (-2, -1, 0, 1)), union(rng, groups, (-1, 0, 1), (-1, 0, 1))


def inside(rng: random.Random) -> tuple[Annotation, Annotation]:
    """The bottom tier changes along one factor, the top tier stays."""
    groups = groups_of(rng, rng.randint(1, 3))
    before = union(rng, groups, rng.choice(((-2, 0, 1), (-1, 0), (-1, 0, 1), (-2,))), (-1, 0, 1))
    swap = {
        -2: rng.choice((-1, 0, 1)),
        -1: rng.choice((-1, 0, 1)),
        0: rng.choice((0, -1)),
        1: rng.choice((1, -1)),
    }
    after = []
    for one in before.states:
        order: dict[int, int] = {}
        for dim, parts in one.order:
            order[swap[dim]] = order.get(swap[dim], 1) * parts
        after.append(DistributedStates(tuple(order.items())))
    return before, before.replace(states=after)


def moved(rng: random.Random) -> tuple[Annotation, Annotation]:
    before = union(rng, groups_of(rng, rng.randint(1, 3)), (-2, -1, 0, 1), (-2, -1, 0, 1))
    groups = moved_groups(rng, before.groups)
    if before.has_partial:
        return before, union(rng, groups, (-1, 0, 1), (before.hdim if before.hdim != PARTIAL else -1,))
    return before, Annotation(groups, before.states, before.hdim)


def across(rng: random.Random) -> tuple[Annotation, Annotation]:
    """The top tier changes; subgroups of different widths, alike inside or only nearly so."""
    groups = groups_of(rng, rng.randint(2, 4))
    hdim, to_hdim = rng.choice(((-2, -1), (-2, 0), (-2, 1), (0, -1), (1, -1), (0, -1), (1, -1)))
    dims = rng.choice(((-1, 0, 1), (-1, 1 - max(hdim, to_hdim, 0)), (1 - max(hdim, to_hdim, 0),)))
    if any(len(group) in (4, 8) for group in groups) and len(dims) == 1 and rng.random() < 0.3:
        dims = (-1, *dims)
    if rng.random() < 0.15:
        groups = tuple(DeviceGroup(tuple(range(4 * i, 4 * i + 4))) for i in range(len(groups)))
        one = states(rng, 4, dims)
        after = Annotation(groups, (one,) * len(groups), to_hdim)
    else:
        after = union(rng, groups, dims, (to_hdim,))
    before = after.replace(hdim=hdim)
    if rng.random() < 0.4:
        changed = []
        for own in after.states:
            source = rng.choice([dim for dim, _ in own.order] or [-1])
            target = rng.choice((-2, -1))
            order = [(target if dim == source else dim, parts) for dim, parts in own.order]
            changed.append(DistributedStates(tuple(order)) if len(dict(order)) == len(order) else own)
        before = before.replace(states=changed)
    return before, after


def aligned(rng: random.Random) -> tuple[Annotation, Annotation]:
    """Partial inside every subgroup and across subgroups: reduced inside, then across."""
    sizes = rng.sample((2, 3, 4, 4, 6), rng.randint(2, 3))
    ranks = rng.sample(range(16), 16)
    groups = tuple(DeviceGroup(tuple(ranks.pop() for _ in range(size))) for size in sizes)
    target = rng.choice((-1, -1, 0, 1))
    before, after = [], []
    for size in sizes:
        order = (
            [(-2, size)]
            if size < 4 or rng.random() < 0.5
            else rng.sample([(-2, 2), (1 - max(target, 0), size // 2)], 2)
        )
        before.append(DistributedStates(tuple(order)))
        after.append(DistributedStates(tuple((target if dim == -2 else dim, parts) for dim, parts in order)))
    return Annotation(groups, tuple(before), -2), Annotation(groups, tuple(after), -1)


def kept_partial(rng: random.Random) -> tuple[Annotation, Annotation]:
    """The destination is Partial: only some of these can be carried out."""
    before, after = inside(rng)
    if before.hsize > 1 and rng.random() < 0.5:
        return before.replace(hdim=-2), after.replace(hdim=-2)
    if rng.random() < 0.3:
        return after, before
    two = DistributedStates(((-2, 2), (rng.choice((-1, 0, 1)), 2)))
    other = DistributedStates(((-2, 2), (rng.choice((-1, 0, 1)), 2)))
    return Annotation((DeviceGroup((3, 1, 2, 0)),), (two,)), Annotation(
        (DeviceGroup((3, 1, 2, 0)),), (other,)
    )


MAKERS: tuple[Callable[[random.Random], tuple[Annotation, Annotation]], ...] = (
    anything,
    same_groups,
    inside,
    moved,
    across,
    across,
    across,
    aligned,
    kept_partial,
)


def check_stages(plan: CommPlan, shape: tuple[int, ...]) -> None:
    """No Partial is sent, every element is written once at most, in place nothing is read and written."""
    before = plan.src
    for stage in plan.stages:
        written: dict[int, np.ndarray] = {rank: np.zeros(shape, np.int64) for rank in stage.after.ranks}
        read: dict[int, np.ndarray] = {rank: np.zeros(shape, bool) for rank in before.ranks}
        for step in stage.steps:
            window = tuple(slice(lo, hi) for lo, hi in step.region.bounds(shape))
            if isinstance(step, Transfer):
                assert not before.has_partial, plan
                assert step.src != step.dst, plan
                read[step.src][window] = True
                written[step.dst][window] += 1
            elif isinstance(step, Collective):
                assert len(set(step.ranks)) == len(step.ranks) > 1, plan
                for rank in step.ranks:
                    own = step.piece(rank) if step.kind == "reduce_scatter" else step.region
                    written[rank][tuple(slice(lo, hi) for lo, hi in own.bounds(shape))] += 1
            else:
                assert isinstance(step, Copy)
                written[step.rank][window] += 1
        assert all(counts.max(initial=0) <= 1 for counts in written.values()), plan
        if stage.in_place:
            assert all(before.region(rank) == stage.after.region(rank) for rank in stage.after.ranks), plan
            assert not any((read[rank] & (written[rank] > 0)).any() for rank in stage.after.ranks), plan
        before = stage.after


def resolved(src: Annotation, dst: Annotation) -> CommPlan | None:
    """The plan, or None for the one documented refusal."""
    try:
        return resolve(src, dst)
    except ReshardError as error:
        if "the destination is Partial" not in str(error):
            raise
        return None


def check_pair(src: Annotation, dst: Annotation, shape: tuple[int, ...], seed: int, message: str) -> set[str]:
    """The operators of the pair, after its plan was carried out and compared."""
    full = np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float64)
    plan = resolved(src, dst)
    if plan is None:
        assert dst.has_partial, message
        return {"refused"}
    check_stages(plan, shape)
    result = interpret(plan, shard(src, full, seed), shape)
    if dst.has_partial:
        assert np.array_equal(assemble(dst, result, shape), full), f"{message}\n{plan}"
    else:
        wanted = shard(dst, full)
        assert all(np.array_equal(result[rank], wanted[rank]) for rank in dst.ranks), f"{message}\n{plan}"
    steps = {name.strip("()") for operator in plan.operators for name in operator.split("+")}
    return steps | set(plan.operators)


def test_every_random_pair_ends_exactly_on_its_destination_and_every_operator_occurs_often() -> None:
    counts: Counter[str] = Counter()
    for number in range(PAIRS):
        rng = random.Random(number)
        maker = MAKERS[number % len(MAKERS)]
        src, dst = maker(rng)
        shape = rng.choice(SHAPES)
        counts.update(
            check_pair(
                src, dst, shape, number, f"pair {number} ({maker.__name__}): {src} -> {dst} of {shape}"
            )
        )
    single = ("Identity", "Split", "SR", "AR", "RS", "AG", "SplitAR", "SplitRS", "SplitAG", "BSR")
    rare = {name: counts[name] for name in (*single, "AR+SplitAR", "RS+SplitAR") if counts[name] < 200}
    assert not rare, f"{rare} of {counts}"
    assert counts["refused"] < PAIRS // 10, counts
