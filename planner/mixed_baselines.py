"""What others do with documents of mixed lengths, under the same cost model (paper §9 scenario c, Tables 13 to 16).

- packed windows: one homogeneous strategy; documents are packed into windows of the context, attention over the window.
- the same with variable-length attention: attention inside documents only, as Megatron's packed sequences do it.
- HotSPa's buckets: see `hotspa`.
- the paper's strategies A and B with documents dispatched by cost: `StepChooser` over `paper_strategies`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.layouts import KINDS, Composition, Layout, Layouts
from hetero_megatron.planner.length_sample import Lengths
from hetero_megatron.strategy import Strategy

JUDGED = 12

Window = tuple[int, ...]
"""Lengths of the documents of one window."""


def windows(lengths: Sequence[int], size: int) -> list[Window]:
    """Documents in windows of `size` tokens, first-fit decreasing.

    Raises:
        PlannerError: a document is longer than a window.
    """
    found: list[list[int]] = []
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        if length > size:
            raise PlannerError(
                f"a document of {length} tokens is longer than a window of {size}; cut it first"
            )
        place = next((place for place, left in enumerate(room) if left >= length), len(found))
        if place == len(found):
            found.append([])
            room.append(size)
        found[place].append(length)
        room[place] -= length
    return [tuple(each) for each in found]


def window_step(costs: Costs, strategy: Strategy, packed: Sequence[Window], varlen: bool) -> float:
    """Seconds of a step with these windows, one per micro-batch, dealt to equal pipelines by what they cost."""
    batches = [window if varlen else (sum(window),) for window in packed]
    return costs.step(strategy, dealt(costs, strategy, batches)).seconds


@dataclass(frozen=True, slots=True)
class Baseline:
    """A homogeneous strategy and its mean step."""

    layout: Layout
    pipelines: int
    strategy: Strategy
    seconds: float

    def __str__(self) -> str:
        """Such as `DP4 TP8`."""
        return f"DP{self.pipelines} {self.layout}"


def homogeneous(layouts: Layouts) -> tuple[tuple[Layout, Strategy], ...]:
    """Every homogeneous strategy on all devices whose micro-batches hold the context, with as little recomputation.

    Raises:
        PlannerError: there is none.
    """
    found: list[tuple[Layout, Strategy]] = []
    shapes: set[tuple[int, int, int]] = set()
    for layout in sorted(layouts.all, key=lambda each: KINDS.index(each.recompute)):
        count, rest = divmod(len(layouts.ranks), layout.devices)
        replicas, shape = count * layout.cp, (layout.tp, layout.cp, layout.pp)
        if rest or shape in shapes or layouts.capacity(layout, replicas) < layouts.context:
            continue
        strategy = layouts.build(((layout, count),), layouts.context)
        if strategy is not None:
            shapes.add(shape)
            found.append((layout, strategy))
    if not found:
        raise PlannerError(
            f"no homogeneous strategy on {len(layouts.ranks)} devices holds {layouts.context} tokens per micro-batch; "
            "use more devices or a smaller seq_length"
        )
    return tuple(found)


def best_windows(layouts: Layouts, steps: Sequence[Lengths], varlen: bool, tried: int = 8) -> Baseline:
    """The best homogeneous strategy with windows of the context, and its mean over these steps."""
    packed = [windows(step.tolist(), layouts.context) for step in steps]
    candidates = homogeneous(layouts)
    quick = sorted(
        (window_step(layouts.costs, strategy, packed[0], varlen), number)
        for number, (_, strategy) in enumerate(candidates)
    )
    best: Baseline | None = None
    for _, number in quick[:tried]:
        layout, strategy = candidates[number]
        seconds = float(np.mean([window_step(layouts.costs, strategy, each, varlen) for each in packed]))
        if best is None or seconds < best.seconds:
            best = Baseline(layout, len(strategy.pipelines), strategy, seconds)
    assert best is not None, "there is a candidate"
    return best


def dealt(costs: Costs, strategy: Strategy, batches: Sequence[Window]) -> list[list[Window]]:
    """Windows to equal pipelines, the costliest first to the one with least."""
    found: list[list[Window]] = [[] for _ in strategy.pipelines]
    loads = [0.0] * len(found)
    first = strategy.pipelines[0]
    each = [costs.chunk(first, 0, 0, sum(batch), sum(n * n for n in batch)).total for batch in batches]
    for number in sorted(range(len(batches)), key=lambda number: -each[number]):
        place = min(range(len(found)), key=loads.__getitem__)
        found[place].append(batches[number])
        loads[place] += each[number]
    return found


PAPER = {
    32768: (
        ("A", 32768, ((Layout(16, 1, 1), 1), (Layout(4, 1, 1), 4))),
        ("B", 16384, ((Layout(8, 1, 1), 1), (Layout(4, 1, 2), 3))),
    ),
    16384: (
        ("A", 16384, ((Layout(8, 1, 1), 1), (Layout(4, 1, 2), 3))),
        ("B", 4096, ((Layout(4, 1, 2), 4),)),
    ),
}
"""Paper Tables 15 and 16 by context: (name, longest document, composition), on 32 devices."""


def paper_strategies(layouts: Layouts, steps: Sequence[Lengths]) -> tuple[NamedStrategy, ...]:
    """The paper's strategies A and B for this context, every micro-batch as large as memory allows.

    The tables say nothing of recomputation: of the pipelines for short documents, that which is best for these steps.

    Raises:
        PlannerError: the paper has none for this context, or one does not hold its documents.
    """
    if layouts.context not in PAPER or len(layouts.ranks) != 32:
        raise PlannerError(
            f"the paper has strategies for contexts {sorted(PAPER)} on 32 devices, none for {layouts.context} on "
            f"{len(layouts.ranks)}"
        )
    found = []
    for name, longest, composition in PAPER[layouts.context]:
        most = longest if longest < layouts.context else None
        own = [step.tolist() for step in steps if step.max() <= longest][:JUDGED]
        variants: list[tuple[float, int, NamedStrategy]] = []
        for number, kind in enumerate(KINDS):
            (first, one), *short = composition
            parts = [(first, one, longest)]
            parts += [(replace(layout, recompute=kind), count, 1) for layout, count in short]
            strategy = layouts.build(_composition(layouts, parts))
            if strategy is not None:
                named = NamedStrategy(name, strategy, most)
                chooser = StepChooser([named], layouts.costs)
                if chooser.longest >= longest:
                    seconds = [chooser.candidate(0, step).seconds for step in own]
                    variants.append((sum(seconds), number, named))
        if not variants:
            raise PlannerError(f"the paper's strategy {name} does not fit into the devices' memory")
        found.append(min(variants, key=lambda each: each[:2])[2])
    return tuple(found)


Part = tuple[Layout, int, int]
"""A layout, how many pipelines, and the tokens that a micro-batch must hold."""


def fitting(layouts: Layouts, parts: Sequence[Part]) -> Strategy:
    """A composition as it stands in a table, with as little recomputation as memory asks for.

    Raises:
        PlannerError: it does not fit even with all layers recomputed.
    """
    strategy = layouts.build(_composition(layouts, parts))
    sizes = [p.tokens(layouts.context) for p in strategy.pipelines] if strategy else [0]
    if strategy is None or max(sizes) < max(needed for _, _, needed in parts):
        told = ", ".join(f"{count} x {layout} for {needed} tokens" for layout, count, needed in parts)
        raise PlannerError(
            f"{told} do not fit into the devices' memory, all layers recomputed; use more devices"
        )
    return strategy


def _composition(layouts: Layouts, parts: Sequence[Part]) -> Composition:
    """The parts, each with the first recomputation that holds what it must; its own where one is given."""
    replicas = sum(count * layout.cp for layout, count, _ in parts)
    found = []
    for layout, count, needed in parts:
        kinds = KINDS if layout.recompute == "none" else (layout.recompute,)
        variants = [replace(layout, recompute=kind) for kind in kinds]
        fit = [variant for variant in variants if layouts.capacity(variant, replicas) >= needed]
        found.append(((fit or variants[-1:])[0], count))
    return tuple(found)
