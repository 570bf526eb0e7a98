"""Where the guided search starts: devices of each kind cut alike and dealt over a number of pipelines (paper A.1)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.sketch import Sketch

ALL_NUMBERS = 12
MOST_COMBINATIONS = 64
"""Combinations of degrees over kinds that are tried in full; with more kinds, degrees are equal or one apart."""


def sketches(problem: Problem, speed: Mapping[Block, float], zero: int) -> Iterator[Sketch]:
    """Sketches with every kind's devices in blocks of one size, over every number of pipelines, in every order of kinds.

    Kinds may be left out, so that the best plan of a part of the cluster is a start as well.
    """
    seen: set[Sketch] = set()
    for cp in problem.parts:
        options = {kind: [block for block in own if block.cp == cp] for kind, own in problem.blocks.items()}
        for chosen in _combinations({kind: own for kind, own in options.items() if own}):
            for lanes in _dealt(problem, chosen, speed):
                for rows in problem.rows:
                    found = Sketch.of(lanes, rows, zero)
                    if found not in seen and len(lanes) * rows <= problem.global_batch_size:
                        seen.add(found)
                        yield found


def _combinations(options: Mapping[str, list[Block]]) -> Iterator[tuple[Block, ...]]:
    """A block for each kind, or none."""
    kinds, count = list(options), 1
    for own in options.values():
        count *= len(own) + 1
    if count <= MOST_COMBINATIONS or len(kinds) <= 2:
        for chosen in product(*([None, *options[kind]] for kind in kinds)):
            if any(chosen):
                yield tuple(block for block in chosen if block is not None)
        return
    sizes = sorted({block.tp for own in options.values() for block in own})
    near: dict[tuple[Block, ...], None] = {}
    for tp in sizes:
        base = [min(options[kind], key=lambda block: abs(block.tp - tp)) for kind in kinds]
        near[tuple(base)] = None
        for n, kind in enumerate(kinds):
            for block in options[kind]:
                if block.tp in (tp // 2, 2 * tp):
                    near[(*base[:n], block, *base[n + 1 :])] = None
    yield from near


def _dealt(
    problem: Problem, chosen: tuple[Block, ...], speed: Mapping[Block, float]
) -> Iterator[list[Blocks]]:
    counts = {block: problem.supply.room(block.kind, block.ranks) for block in chosen}
    most = min(sum(counts.values()), problem.global_batch_size)
    allowed = problem.choices.pipelines or _numbers(most, tuple(counts.values()))
    for pipelines in allowed:
        if pipelines > most:
            break
        shares = _shares(counts, pipelines, speed)
        for order in _orders(chosen):
            made = {share: _lane(order, dict(share)) for share in shares}
            lanes = [made[share] for share in shares]
            if all(0 < len(lane) <= problem.config.num_layers for lane in lanes):
                yield lanes


def _numbers(most: int, counts: Sequence[int]) -> list[int]:
    """All numbers of pipelines up to a dozen; beyond, those that some kind's blocks divide by, and one in six others."""
    found, number = [], 1
    for pipelines in range(1, most + 1):
        if pipelines <= ALL_NUMBERS or pipelines >= number * 7 / 6 or all(n % pipelines == 0 for n in counts):
            found.append(pipelines)
            number = pipelines
    return found


def _orders(chosen: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    """Every order of up to three kinds; of more, the turns of one order and of its reverse."""
    if len(chosen) <= 3:
        yield from permutations(chosen)
        return
    for one in (chosen, chosen[::-1]):
        for n in range(len(one)):
            yield one[n:] + one[:n]


def _shares(
    counts: Mapping[Block, int], pipelines: int, speed: Mapping[Block, float]
) -> list[tuple[tuple[Block, int], ...]]:
    """As even as possible; what is left over goes to the lanes that are slowest so far, fast blocks first."""
    shares: list[dict[Block, int]] = [{} for _ in range(pipelines)]
    for block in sorted(counts, key=lambda block: (-speed[block], block)):
        each, over = divmod(counts[block], pipelines)
        for share in shares:
            share[block] = each
        slow = sorted(range(pipelines), key=lambda n: (sum(speed[b] * c for b, c in shares[n].items()), n))
        for n in slow[:over]:
            shares[n][block] += 1
    return [tuple(share.items()) for share in shares]


def _lane(order: tuple[Block, ...], counts: Mapping[Block, int]) -> Blocks:
    return tuple(block for block in order for _ in range(counts[block]))
