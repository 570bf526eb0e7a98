"""For a step's documents: the strategy with the least estimated time, and who takes what (paper A.1, scenario c).

Pure: the same lengths give the same choice on every rank and worker, so that choices are made ahead of the step in the
processes that prepare data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_megatron.data.document_dispatch import DispatchReport
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.pipeline_work import PipelineWork, pipeline_work
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.sharing import Batches, SharingLane, share
from hetero_megatron.strategy import Pipeline, Strategy


@dataclass(frozen=True, slots=True)
class NamedStrategy:
    """A strategy of several in one run.

    Attributes:
        name: how logs and tables call it.
        max_length: steps whose longest document, filled up, has at most so many tokens may take it; None: as many as
            its micro-batches hold.
    """

    name: str
    strategy: Strategy
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one strategy would make of a step.

    Attributes:
        pipelines: per pipeline and micro-batch, the numbers of the documents as they were given.
        seconds: the step, gradients and update included, a switch not.
        report: how it is shared; its bound is that of any sharing over these pipelines.
    """

    pipelines: tuple[Batches, ...]
    seconds: float
    report: DispatchReport


@dataclass(frozen=True, slots=True)
class Choice:
    """Which strategy a step takes.

    Attributes:
        strategy: its number.
        candidate: what it makes of the step.
        seconds: per strategy, what the step would take; None where a document does not fit.
        switch_seconds: of changing to it from the step before; 0 where it stays.
    """

    strategy: int
    candidate: Candidate
    seconds: tuple[float | None, ...]
    switch_seconds: float

    @property
    def pipelines(self) -> tuple[Batches, ...]:
        """Per pipeline and micro-batch, the numbers of the documents."""
        return self.candidate.pipelines

    @property
    def report(self) -> DispatchReport:
        """How well the step is shared."""
        return self.candidate.report

    @property
    def total_seconds(self) -> float:
        """The step with its switch."""
        return self.candidate.seconds + self.switch_seconds


class StepChooser:
    """Chooses among the strategies of a run, step by step or for several steps ahead."""

    def __init__(
        self, strategies: Sequence[NamedStrategy], costs: Costs, switch_seconds: float | None = None
    ) -> None:
        """`switch_seconds`: of any change of strategy; None: what bringing the parameters takes.

        Raises:
            PlannerError: there is no strategy, or two have the same name.
        """
        names = [each.name for each in strategies]
        if not names:
            raise PlannerError("there is no strategy to choose from; give at least one")
        for name in names:
            if names.count(name) > 1:
                raise PlannerError(f"two strategies have the name {name!r}; give each its own")
        self.strategies, self.costs = tuple(strategies), costs
        self._works: dict[tuple[object, ...], PipelineWork] = {}
        self.lanes = tuple(self._lanes(each) for each in strategies)
        self.switches = tuple(
            tuple(
                0.0
                if before is after
                else self._switch(before.strategy, after.strategy)
                if switch_seconds is None
                else switch_seconds
                for after in strategies
            )
            for before in strategies
        )

    @property
    def longest(self) -> int:
        """The longest document that some strategy holds."""
        return max(lane.reach for lanes in self.lanes for lane in lanes)

    def choose(self, lengths: Sequence[int], before: int | None = None) -> Choice:
        """The strategy for a step with documents of these lengths, after a step of strategy `before`.

        Raises:
            PlannerError: a document fits into no strategy's micro-batches, or there is none.
        """
        return self.choose_many([lengths], before)[0]

    def choose_many(self, steps: Sequence[Sequence[int]], before: int | None = None) -> tuple[Choice, ...]:
        """The strategies for consecutive steps: the least time of all of them together, switches included.

        Raises:
            PlannerError: a document fits into no strategy's micro-batches, or a step has none.
        """
        tables = [self.candidates(lengths) for lengths in steps]
        seconds = [[each.seconds if each else np.inf for each in own] for own in tables]
        if not seconds:
            return ()
        switches, came = np.array(self.switches), []
        total = np.array(seconds[0]) + (0.0 if before is None else switches[before])
        for row in seconds[1:]:
            through = total[:, None] + switches
            came.append(through.argmin(axis=0))
            total = through.min(axis=0) + row
        path = [int(total.argmin())]
        for back in reversed(came):
            path.append(int(back[path[-1]]))
        path.reverse()
        found, last = [], before
        for number, own in zip(path, tables, strict=True):
            chosen = own[number]
            assert chosen is not None, "the least total is finite: some strategy holds every step"
            switch = 0.0 if last is None else self.switches[last][number]
            found.append(
                Choice(number, chosen, tuple(each.seconds if each else None for each in own), switch)
            )
            last = number
        return tuple(found)

    def candidates(self, lengths: Sequence[int]) -> tuple[Candidate | None, ...]:
        """What each strategy would make of a step; None where a document does not fit.

        Raises:
            PlannerError: a document fits nowhere, or there is none.
        """
        if not len(lengths):
            raise PlannerError("a step without documents has no strategy; a step takes at least one")
        longest = max(lengths)
        if longest > self.longest:
            told = ", ".join(
                f"{each.name}: {max(lane.reach for lane in lanes)}"
                for each, lanes in zip(self.strategies, self.lanes, strict=True)
            )
            raise PlannerError(
                f"document {list(lengths).index(longest)} has {longest} tokens and fits into no strategy (longest "
                f"documents: {told}); cut such documents (data.long_documents) or add a strategy for them"
            )
        return tuple(
            self.candidate(number, lengths) if max(lane.reach for lane in lanes) >= longest else None
            for number, lanes in enumerate(self.lanes)
        )

    def candidate(self, number: int, lengths: Sequence[int]) -> Candidate:
        """What strategy `number` makes of a step.

        Raises:
            PlannerError: a document fits into none of its pipelines.
        """
        lanes, strategy = self.lanes[number], self.strategies[number].strategy
        shared = share(lengths, lanes)
        pipelines = shared.pipelines
        estimate = self.costs.step(strategy, _lengths(pipelines, lengths))
        if any(lane.work.depth > 1 for lane in lanes):
            # Small micro-batches where the pipeline fills and drains: often shorter, for 1F1B; the better one counts.
            other = tuple(_small_ends(own) for own in pipelines)
            second = self.costs.step(strategy, _lengths(other, lengths))
            better = [a <= b for a, b in zip(estimate.pipeline_seconds, second.pipeline_seconds, strict=True)]
            if not all(better):
                pipelines = tuple(
                    a if first else b for first, a, b in zip(better, pipelines, other, strict=True)
                )
                estimate = self.costs.step(strategy, _lengths(pipelines, lengths)) if any(better) else second
        return Candidate(
            pipelines,
            estimate.seconds,
            self._report(number, pipelines, lengths, estimate.pipeline_seconds, shared.lower_bound),
        )

    def _report(
        self,
        number: int,
        pipelines: Sequence[Batches],
        lengths: Sequence[int],
        seconds: tuple[float, ...],
        bound: float,
    ) -> DispatchReport:
        padding, worst = 0, 1.0
        for lane, own in zip(self.lanes[number], pipelines, strict=True):
            tokens = [sum(lengths[each] for each in batch) for batch in own]
            padding += sum(-each % lane.multiple for each in tokens)
            if own:
                documents = np.asarray(lengths, dtype=np.int64)
                costs = [float(lane.work.alone(documents[list(batch)]).sum()) for batch in own]
                worst = max(worst, max(costs) * len(own) / sum(costs))
        return DispatchReport(int(sum(lengths)), padding, seconds, bound, worst)

    def _lanes(self, named: NamedStrategy) -> tuple[SharingLane, ...]:
        strategy, found = named.strategy, []
        for number, pipeline in enumerate(strategy.pipelines):
            multiple = strategy.token_multiple(number)
            capacity = pipeline.tokens(self.costs.seq_length)
            if pipeline.max_tokens is None:
                capacity += -capacity % multiple
            longest = capacity if named.max_length is None else named.max_length
            found.append(SharingLane(self._work(pipeline), capacity, multiple, longest))
        return tuple(found)

    def _work(self, pipeline: Pipeline) -> PipelineWork:
        shapes = tuple(self.costs.shape(stage) for stage in pipeline.stages)
        key = (shapes, pipeline.token_shares)
        if key not in self._works:
            self._works[key] = pipeline_work(self.costs, pipeline, self.costs.seq_length)
        return self._works[key]

    def _switch(self, before: Strategy, after: Strategy) -> float:
        """Until the rank that gets the most has its parameters in the new layout: states stay where they are."""
        cluster, item = self.costs.cluster, self.costs.item
        if before == after:
            return 0.0
        nodes = {cluster.node_of(rank) for rank in (*before.ranks, *after.ranks)}
        slowest = 0.0
        for rank, elements in self.costs.parameters(after).items():
            link = cluster.inter_node if len(nodes) > 1 else cluster.kind(rank).link
            slowest = max(slowest, link.latency_s + elements * item / bytes_per_second(link))
        return slowest


def _lengths(pipelines: Sequence[Batches], lengths: Sequence[int]) -> list[list[tuple[int, ...]]]:
    return [[tuple(lengths[each] for each in batch) for batch in own] for own in pipelines]


def _small_ends(batches: Batches) -> Batches:
    """The two cheapest micro-batches, which come last, at both ends."""
    return batches if len(batches) < 3 else (batches[-1], *batches[:-1])
