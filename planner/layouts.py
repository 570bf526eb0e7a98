"""Ways to build one pipeline on equal devices: TP, CP, stages and recomputation, and what each holds (paper A.1, c)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.pipeline_work import Floats, PipelineWork, pipeline_work
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy

MOST_NODES_PER_TP, MOST_CP = 2, 8
KINDS = ("none", "selective", "half", "full")
"""Recomputation of a pipeline's layers; `half`: full, of the first half of each stage's layers."""
MOST_ROWS = 2
"""Micro-batches of more than so many contexts are not looked at: what they save is little."""
LEAST_SHARE = 64
"""Micro-batches of less than one part in so many of the context are of no use."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`pp` stages of `cp` parts of `tp` ranks."""

    tp: int
    cp: int
    pp: int
    recompute: str = "none"

    @property
    def devices(self) -> int:
        """Ranks of the pipeline."""
        return self.tp * self.cp * self.pp

    def __str__(self) -> str:
        """`TP8`, `TP4 CP2 PP2 full`."""
        found = [f"TP{self.tp}"]
        found += [f"{name}{size}" for name, size in (("CP", self.cp), ("PP", self.pp)) if size > 1]
        return " ".join([*found, *([self.recompute] if self.recompute != "none" else [])])


Composition = tuple[tuple[Layout, int], ...]
"""Layouts and how many pipelines of each, largest first."""


def composition_text(composition: Composition) -> str:
    """`1 x TP16, 4 x TP4`."""
    return ", ".join(f"{count} x {layout}" for layout, count in composition)


class Layouts:
    """All layouts of a model on a cluster of one kind of device, for documents of up to `context` tokens."""

    def __init__(self, costs: Costs, context: int) -> None:
        """Nothing is enumerated yet.

        Raises:
            PlannerError: the cluster has devices of several kinds.
        """
        kinds = sorted({device.kind for device in costs.cluster.devices})
        if len(kinds) > 1:
            raise PlannerError(
                f"strategies by document length are planned on one kind of device, and the cluster has {', '.join(kinds)}; "
                "plan each kind by itself, or plan for rows"
            )
        self.costs, self.context = costs, context
        self.ranks = tuple(sorted(costs.cluster.ranks))
        self._capacities: dict[tuple[Layout, int], int] = {}
        self._works: dict[Layout, PipelineWork] = {}
        self._splits: dict[tuple[int, int, int], tuple[int, ...]] = {}

    @cached_property
    def all(self) -> tuple[Layout, ...]:
        """Layouts that fit the model and the cluster, by number of devices."""
        config, count = self.costs.config, len(self.ranks)
        per_node = max(
            sum(device.node == node for device in self.costs.cluster.devices)
            for node in {device.node for device in self.costs.cluster.devices}
        )
        found = []
        for tp in _powers(min(config.num_attention_heads, MOST_NODES_PER_TP * per_node, count)):
            if config.num_attention_heads % tp or config.ffn_hidden_size % tp:
                continue
            for cp in _powers(min(MOST_CP, count // tp)):
                for pp in _powers(min(config.num_layers, count // (tp * cp))):
                    found += [Layout(tp, cp, pp, kind) for kind in KINDS]
        return tuple(sorted(found, key=lambda each: (each.devices, each)))

    @property
    def most_replicas(self) -> int:
        """How many pipelines there can be: of the fewest devices that hold the model at all."""
        count = len(self.ranks)
        for layout in self.all:
            pipelines = count // layout.devices
            if self.capacity(layout, pipelines * layout.cp) * LEAST_SHARE >= self.context:
                return pipelines
        return 1

    def useful(self, replicas: int) -> tuple[Layout, ...]:
        """Layouts of which no other one on as many devices holds as much, is no deeper and no slower at any length."""
        found: list[Layout] = []
        lengths = np.unique(np.geomspace(min(256, self.context), self.context, 6).astype(np.int64))
        for _, group in groupby(self.all, key=lambda each: each.devices):
            known: list[tuple[Layout, int, Floats]] = []
            full: set[tuple[int, int, int]] = set()
            for layout in sorted(group, key=lambda each: (KINDS.index(each.recompute), each)):
                shape = (layout.tp, layout.cp, layout.pp)
                # What holds the whole context needs no recomputation.
                if shape in full:
                    continue
                most = self.capacity(layout, replicas)
                if most >= self.context:
                    full.add(shape)
                if most * LEAST_SHARE >= self.context:
                    known.append((layout, most, self.work(layout).alone(lengths)))
            found += [
                layout
                for layout, most, seconds in known
                if not any(
                    other is not layout
                    and room >= most
                    and other.pp <= layout.pp
                    and (taken <= seconds).all()
                    and (room > most or other.pp < layout.pp or (taken < seconds).any() or other < layout)
                    for other, room, taken in known
                )
            ]
        return tuple(found)

    def work(self, layout: Layout) -> PipelineWork:
        """What documents cost in a pipeline of this layout."""
        if layout not in self._works:
            self._works[layout] = pipeline_work(self.costs, self.pipeline(layout, self.ranks), self.context)
        return self._works[layout]

    def capacity(self, layout: Layout, replicas: int) -> int:
        """Most tokens of a micro-batch, `MOST_ROWS` contexts at most, if states are cut over so many replicas; 0: none."""
        key = (layout, replicas)
        if key not in self._capacities:
            # Of a rank's memory only its own pipeline and the number of replicas matter.
            self._capacities[key] = self._most(
                lambda tokens: self._over(
                    self.strategy_of([self.pipeline(layout, self.ranks, tokens)]), max(replicas, layout.cp)
                ),
                layout.tp * layout.cp,
            )
        return self._capacities[key]

    def _most(self, excess_of: Callable[[int], float], unit: int) -> int:
        """The most tokens that fit: memory is nearly linear in them, so that few guesses are needed."""
        low, high = 0, MOST_ROWS * self.context // unit + 1
        over, under = excess_of(unit), excess_of((high - 1) * unit)
        if over > 0 or under <= 0:
            return 0 if over > 0 else (high - 1) * unit
        slope = (under - over) / (high - 2)
        guess = 1 + int(-over / slope)
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            excess = excess_of(guess * unit)
            if excess > 0:
                high, guess = guess, guess - 1 - int(excess / slope)
            else:
                low, guess = guess, guess + max(1, int(-excess / slope))
        return low * unit

    def _over(self, strategy: Strategy, replicas: int | None = None) -> float:
        """Bytes by which the fullest device is over what it holds; negative where all fit."""
        return max(
            size - self.costs.cluster.kind(rank).memory_bytes
            for rank, size in self.costs.memory(strategy, replicas).items()
        )

    def fits(self, strategy: Strategy) -> bool:
        """Whether every rank's device holds what the strategy puts there."""
        return self._over(strategy) <= 0

    def pipeline(
        self, layout: Layout, ranks: Sequence[int], max_tokens: int | None = None, micro_batches: int = 0
    ) -> Pipeline:
        """A pipeline on the first of these ranks; `micro_batches` 0: as many as keep all stages busy.

        Its micro-batches have as many rows of the context as `max_tokens` fill, the last one in part.
        """
        size = layout.tp * layout.cp
        ends = [0]
        for held in self._split(layout):
            ends.append(ends[-1] + held)
        stages = tuple(
            Stage(
                tuple(ranks[place * size : (place + 1) * size]),
                (first, end - 1),
                layout.tp,
                layout.cp,
                _recompute(layout.recompute, first, end),
            )
            for place, (first, end) in enumerate(pairwise(ends))
        )
        rows = 1 if max_tokens is None else -(-max_tokens // self.context)
        return Pipeline(micro_batches or 2 * layout.pp, max(1, rows), stages, max_tokens)

    def _split(self, layout: Layout) -> tuple[int, ...]:
        """Layers per stage: even, with fewer on the last one where the head is dear enough."""
        key = (layout.tp, layout.cp, layout.pp)
        if key not in self._splits:
            layers, pp = self.costs.config.num_layers, layout.pp
            best: tuple[float, tuple[int, ...]] | None = None
            for less in range(min(4, layers // pp) if pp > 1 else 1):
                last = layers // pp - less
                others = (
                    [
                        (layers - last) // (pp - 1) + (place < (layers - last) % (pp - 1))
                        for place in range(pp - 1)
                    ]
                    if pp > 1
                    else []
                )
                self._splits[key] = split = (*others, last)
                if last < 1:
                    break
                trial = self.pipeline(Layout(layout.tp, layout.cp, pp), self.ranks)
                slowest = max(
                    self.costs.chunk(trial, stage, 0, 4096, 4096 * 1024).total for stage in range(pp)
                )
                if best is None or slowest < best[0]:
                    best = slowest, split
            assert best is not None, "an even split was tried"
            self._splits[key] = best[1]
        return self._splits[key]

    def strategy_of(self, pipelines: Sequence[Pipeline]) -> Strategy:
        """A strategy with ZeRO-1; ranks without work are idle."""
        used = {rank for pipeline in pipelines for stage in pipeline.stages for rank in stage.ranks}
        return Strategy(
            tuple(pipelines),
            zero=1,
            sequence_parallel=self.costs.sequence_parallel,
            idle_ranks=tuple(rank for rank in self.ranks if rank not in used),
            context_parallel=self.costs.context_parallel,
        )

    def build(self, composition: Composition, max_length: int | None = None) -> Strategy | None:
        """The strategy of a composition, every micro-batch as large as memory allows; None where that is nothing.

        `max_length`: some pipeline must hold a document of so many tokens, else None.
        """
        replicas = sum(count * layout.cp for layout, count in composition)
        pipelines, first = [], 0
        longest = 0
        for layout, count in composition:
            most = self.capacity(layout, replicas)
            if most < 1:
                return None
            longest = max(longest, most)
            for _ in range(count):
                ranks = self.ranks[first : first + layout.devices]
                pipelines.append(self.pipeline(layout, ranks, most))
                first += layout.devices
        if max_length is not None and longest < max_length:
            return None
        found = self.strategy_of(pipelines)
        return found if self.fits(found) else None


def _recompute(kind: str, first: int, end: int) -> tuple[Recompute, ...]:
    """Of the layers [first, end) of a stage."""
    if kind == "half":
        return (Recompute("full", (first, first + (end - first + 1) // 2 - 1)),)
    return () if kind == "none" else (Recompute(kind),)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
