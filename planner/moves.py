"""Small changes of a sketch, from which the guided search climbs (paper A.1, first level)."""

from collections.abc import Iterator, Sequence

from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.sketch import Sketch


def moves(problem: Problem, sketch: Sketch) -> Iterator[Sketch]:
    """Every sketch that is one change away, each once, in an order that depends on the sketch alone.

    Changes: a block goes to another lane, or changes places with one; a block is cut in two, or two become one; a lane
    is cut in two, or two become one; idle devices join a lane, or a block becomes idle; blocks of a lane change their
    order; another size of micro-batches.
    """
    seen = {sketch}
    for lanes, rows in _changes(problem, sketch):
        found = Sketch.of([lane for lane in lanes if lane], rows, sketch.zero)
        if found.lanes and found not in seen and len(problem_counts(problem, found)):
            seen.add(found)
            if problem.supply.holds(found.blocks):
                yield found


def problem_counts(problem: Problem, sketch: Sketch) -> tuple[int, ...]:
    """The number of pipelines if it is one that the problem allows, else nothing."""
    count, allowed = len(sketch.lanes), problem.choices.pipelines
    return (count,) if not allowed or count in allowed else ()


def _changes(problem: Problem, sketch: Sketch) -> Iterator[tuple[list[Blocks], int]]:
    lanes, rows = sketch.lanes, sketch.rows
    # Equal lanes are alike: one of each, but two where a change is between two.
    firsts = [n for n, lane in enumerate(lanes) if lane not in lanes[:n]]
    pairs = [
        (a, b)
        for a in firsts
        for b in [*firsts, *(n for n in range(len(lanes)) if lanes[n] == lanes[a] and n != a)][
            : len(firsts) + 1
        ]
        if a != b
    ]

    def swapped(new: dict[int, Sequence[Blocks]]) -> list[Blocks]:
        kept = [lane for n, lane in enumerate(lanes) if n not in new]
        return kept + [lane for parts in new.values() for lane in parts]

    for other in problem.rows:
        if other != rows:
            yield list(lanes), other
    for a in firsts:
        for lane in _reshaped(problem, lanes[a]):
            yield swapped({a: [lane]}), rows
        for cut in range(1, len(lanes[a])):
            yield swapped({a: [lanes[a][:cut], lanes[a][cut:]]}), rows
        half, other_half = lanes[a][0::2], lanes[a][1::2]
        if other_half:
            yield swapped({a: [half, other_half]}), rows
    for a, b in pairs:
        if a < b and lanes[a][0].cp == lanes[b][0].cp:
            yield swapped({a: [_merged(lanes[a], lanes[b])], b: []}), rows
        for n in _firsts(lanes[a]):
            block, rest = lanes[a][n], lanes[a][:n] + lanes[a][n + 1 :]
            if block.cp != lanes[b][0].cp:
                continue
            for grown in _inserted(lanes[b], block):
                yield swapped({a: [rest], b: [grown]}), rows
            for m in _firsts(lanes[b]):
                if lanes[b][m] != block:
                    taken = lanes[b][m]
                    yield (
                        swapped(
                            {
                                a: [(*lanes[a][:n], taken, *lanes[a][n + 1 :])],
                                b: [(*lanes[b][:m], block, *lanes[b][m + 1 :])],
                            }
                        ),
                        rows,
                    )
    # Idle devices.
    blocks = sketch.blocks
    for kind, own in problem.blocks.items():
        sizes = [b for b in own if problem.supply.holds((*blocks, b))]
        for block in sizes[-2:]:
            for a in firsts:
                if lanes[a][0].cp == block.cp:
                    for grown in _inserted(lanes[a], block):
                        yield swapped({a: [grown]}), rows
            yield [*lanes, (block,)], rows
        del kind


def _reshaped(problem: Problem, lane: Blocks) -> Iterator[Blocks]:
    """One lane changed by itself."""
    for n in _firsts(lane):
        block = lane[n]
        sizes = {b.tp: b for b in problem.blocks[block.kind] if b.cp == block.cp}
        if block.tp % 2 == 0 and block.tp // 2 in sizes:
            small = sizes[block.tp // 2]
            yield (*lane[:n], small, small, *lane[n + 1 :])
            yield (*lane[:n], small, *lane[n + 1 :])
        if 2 * block.tp in sizes:
            twins = [m for m in range(n + 1, len(lane)) if lane[m] == block]
            if twins:
                m = twins[0]
                yield (*lane[:n], sizes[2 * block.tp], *lane[n + 1 : m], *lane[m + 1 :])
            yield (*lane[:n], sizes[2 * block.tp], *lane[n + 1 :])
        if len(lane) > 1:
            yield lane[:n] + lane[n + 1 :]
            yield from _inserted(lane[:n] + lane[n + 1 :], block)
    # The same devices from the other end.
    yield lane[::-1]


def _firsts(lane: Blocks) -> list[int]:
    """One place of each run of equal blocks."""
    return [n for n in range(len(lane)) if n == 0 or lane[n] != lane[n - 1]]


def _inserted(lane: Blocks, block: Block) -> Iterator[Blocks]:
    """The block at every place where it makes a difference."""
    for n in range(len(lane) + 1):
        if n == 0 or lane[n - 1] != block:
            yield (*lane[:n], block, *lane[n:])


def _merged(one: Blocks, other: Blocks) -> Blocks:
    """All blocks of both, equal ones side by side, in the order of the first."""
    kinds = list(dict.fromkeys((*one, *other)))
    return tuple(sorted((*one, *other), key=kinds.index))
