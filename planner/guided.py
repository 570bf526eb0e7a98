"""Level 1 by guided search: starts of every shape, then small changes that pay (paper A.1).

Sketches whose least possible time is not below the best found so far are never worked out. The order of everything
depends on the problem alone, and effort is counted in sketches, not in seconds: the same problem gives the same plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_megatron.planner.drafts import Drafts
from hetero_megatron.planner.moves import moves
from hetero_megatron.planner.seeds import sketches
from hetero_megatron.planner.sketch import Draft, Sketch


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at.

    Attributes:
        seeds: first sketches that are worked out, the likeliest first.
        starts: how many of them are climbed from.
        climbs: changes in a row.
        sketches: worked out in all.
    """

    seeds: int = 250
    starts: int = 5
    climbs: int = 12
    sketches: int = 1200


def guided(drafts: Drafts, zero: int, effort: Effort, more: Iterable[Sketch] = ()) -> list[Draft]:
    """Drafts in ascending order of the seconds that they would take; `more` are sketches to start from as well."""
    problem = drafts.prices.problem
    speed = {block: drafts.speed(block) for own in problem.blocks.values() for block in own}
    found: dict[Sketch, Draft] = {}
    best = float("inf")
    starts = sorted(sketches(problem, speed, zero), key=drafts.likely_seconds)
    for sketch in (*more, *starts[: effort.seeds]):
        draft = drafts.draft(sketch, best) if drafts.least_seconds(sketch) < best else None
        if draft is not None:
            found[sketch] = draft
            best = min(best, draft.seconds)
    climbed: set[Sketch] = set()
    for draft in _different(found.values(), effort.starts):
        _climb(drafts, draft, effort, found, climbed)
    return sorted(found.values(), key=lambda each: (each.seconds, each.sketch.lanes, each.sketch.rows))


def _different(found: Iterable[Draft], count: int) -> list[Draft]:
    """The best drafts, no two with the same number of pipelines and the same blocks."""
    chosen: dict[object, Draft] = {}
    for draft in sorted(found, key=lambda each: (each.seconds, each.sketch.lanes, each.sketch.rows)):
        key = (len(draft.lanes), tuple(sorted(set(draft.sketch.blocks))))
        chosen.setdefault(key, draft)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _climb(
    drafts: Drafts, start: Draft, effort: Effort, found: dict[Sketch, Draft], climbed: set[Sketch]
) -> None:
    """The best change, again and again, until none pays or another climb was here."""
    now = start
    for _ in range(effort.climbs):
        if now.sketch in climbed:
            return
        climbed.add(now.sketch)
        better: Draft | None = None
        for sketch in moves(drafts.prices.problem, now.sketch):
            if len(found) >= effort.sketches:
                break
            limit = (better or now).seconds
            if drafts.least_seconds(sketch) >= limit:
                continue
            draft = drafts.draft(sketch, limit)
            if draft is not None:
                found[sketch] = draft
                if draft.seconds < limit * (1 - 1e-9):
                    better = draft
        if better is None:
            return
        now = better
