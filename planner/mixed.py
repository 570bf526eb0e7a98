"""A set of strategies for documents of mixed lengths, each for steps up to a longest document (paper A.1, scenario c).

Offline: length statistics give sample steps; for each longest document the dynamic programme of `intervals` proposes
compositions of pipelines; the best of them on sample steps, and the set that is best together, are kept.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.intervals import Loads, Option, best_of
from hetero_megatron.planner.layouts import Composition, Layouts, composition_text
from hetero_megatron.planner.length_sample import Lengths, LengthSample, borders
from hetero_megatron.strategy import Strategy

STEPS, TYPICAL, TRIED, FINALISTS = 256, 4, 16, 3
JUDGED = 20
WORTH = 0.005
"""Another strategy stays in the set if it saves this share of the mean step."""


@dataclass(frozen=True, slots=True)
class PlannedStrategy:
    """A strategy of the set.

    Attributes:
        named: with its name and the longest document that it takes.
        composition: its pipelines.
        seconds: its mean step over those sample steps that it is for.
    """

    named: NamedStrategy
    composition: Composition
    seconds: float

    def __str__(self) -> str:
        """Its pipelines, such as `1 x TP16, 4 x TP4`."""
        return composition_text(self.composition)


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """The strategies, the longest documents first, and how long planning took."""

    strategies: tuple[PlannedStrategy, ...]
    plan_seconds: float

    @property
    def named(self) -> tuple[NamedStrategy, ...]:
        """The strategies as a StepChooser takes them."""
        return tuple(each.named for each in self.strategies)


def plan_mixed(
    costs: Costs, lengths: Lengths, tokens_per_step: int, most: int = 4, seed: int = 1234
) -> MixedPlan:
    """Strategies for documents of these lengths, longer ones cut to `costs.seq_length`; at most `most` of them.

    Deterministic. One of them takes documents of the whole context.

    Raises:
        PlannerError: no strategy holds the longest document, or the lengths are none.
    """
    began = time.perf_counter()
    context = costs.seq_length
    sample = LengthSample.draw(lengths, context, tokens_per_step, STEPS, seed)
    layouts = Layouts(costs, context)
    longest = max(sample.longest)
    limits = [0, *(each for each in borders(context)[::2] if each < longest), longest]
    pool: list[_Finalist] = []
    for low, high in pairwise(sorted(set(limits[-4:]) | {0})):
        steps = sample.up_to(low, high, TYPICAL)
        if steps:
            pool += _finalists(layouts, steps, high, FINALISTS)
    if not any(each.reach >= longest for each in pool):
        raise PlannerError(
            f"no strategy of {len(layouts.ranks)} {costs.cluster.kind(layouts.ranks[0]).name} devices holds a document "
            f"of {longest} tokens; use more devices, or a smaller seq_length"
        )
    # Spread over the sample, so that the judged steps have the sample's share of long documents.
    judged = [sample.steps[place] for place in np.linspace(0, STEPS - 1, JUDGED).astype(int).tolist()]
    chosen = _best_set(layouts.costs, pool, judged, longest, most)
    planned = tuple(
        PlannedStrategy(
            NamedStrategy(_name(place), each.strategy, each.reach if each.reach < context else None),
            each.composition,
            each.seconds,
        )
        for place, each in enumerate(chosen)
    )
    return MixedPlan(planned, time.perf_counter() - began)


def _name(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"S{place}"


@dataclass(frozen=True, slots=True)
class _Finalist:
    """A composition that did well: its strategy, the longest document it takes, its mean step."""

    composition: Composition
    strategy: Strategy
    reach: int
    seconds: float


def _finalists(layouts: Layouts, steps: Sequence[Lengths], longest: int, most: int) -> list[_Finalist]:
    """The compositions that take least time for these steps, by the cost model itself."""
    devices = len(layouts.ranks)
    ends = [each for each in borders(layouts.context) if each < longest] + [longest]
    loads = Loads(steps, ends)
    ways: dict[Composition, float] = {}
    for replicas in _replicas(layouts.most_replicas):
        options = [
            Option(layout, layouts.work(layout), layouts.capacity(layout, replicas))
            for layout in layouts.useful(replicas)
        ]
        for seconds, composition in best_of(loads, options, devices):
            if sum(count * layout.cp for layout, count in composition) >= replicas:
                ways[composition] = min(seconds, ways.get(composition, np.inf))
    proposed = [each for each, _ in sorted(ways.items(), key=lambda each: (each[1], each[0]))]
    alike = [((layout, devices // layout.devices),) for layout in layouts.useful(layouts.most_replicas)]
    # All on the first step, the better half on the others too.
    racing: list[tuple[float, Composition, StepChooser]] = []
    for composition in dict.fromkeys([*proposed[:TRIED], *alike]):
        strategy = layouts.build(composition, longest)
        if strategy is not None:
            chooser = StepChooser([NamedStrategy("one", strategy)], layouts.costs)
            racing.append((chooser.candidate(0, steps[0].tolist()).seconds, composition, chooser))
    racing.sort(key=lambda each: each[:2])
    found = []
    for first, composition, chooser in racing[: max(2 * most, len(racing) // 3)]:
        rest = [chooser.candidate(0, step.tolist()).seconds for step in steps[1:]]
        mean = float(np.mean([first, *rest]))
        found.append(_Finalist(composition, chooser.strategies[0].strategy, chooser.longest, mean))
    return sorted(found, key=lambda each: (each.seconds, each.composition))[:most]


def _replicas(most: int) -> list[int]:
    """Numbers of replicas for which capacities are asked: with more of them than that, more fits."""
    return [each for each in (1, 2, 3, 5, 8, 13, 21, 34) if each <= most and (each > 1 or most == 1)]


def _best_set(
    costs: Costs, pool: Sequence[_Finalist], steps: Sequence[Lengths], longest: int, most: int
) -> list[_Finalist]:
    """The few that are best together: one after the other, whichever saves most; one of them takes every step."""
    unique = list({each.composition: each for each in pool}.values())
    # A run that switches needs all ranks in every strategy: each holds optimizer states.
    unique = [each for each in unique if not each.strategy.idle_ranks] or unique
    table = np.full((len(unique), len(steps)), np.inf)
    for number, each in enumerate(unique):
        chooser = StepChooser([NamedStrategy("one", each.strategy)], costs)
        for place, step in enumerate(steps):
            if step.max() <= chooser.longest:
                table[number, place] = chooser.candidate(0, step.tolist()).seconds
    if not any(each.reach >= longest for each in unique):
        unique = list({each.composition: each for each in pool}.values())
    whole = [number for number, each in enumerate(unique) if each.reach >= longest]
    chosen = [min(whole, key=lambda number: (table[number].mean(), number))]
    now = table[chosen[0]]
    while len(chosen) < most:
        gains = [float((now - np.minimum(now, row)).mean()) for row in table]
        best = int(np.argmax(gains))
        if gains[best] < WORTH * now.mean():
            break
        chosen.append(best)
        now = np.minimum(now, table[best])
    return sorted((unique[number] for number in chosen), key=lambda each: (-each.reach, each.composition))
