"""What a strategy costs, in closed forms and one small recursion: no Program is built (paper A.1).

Every time is that of the slowest rank that takes part. Times come from `Profiles`: measured where something was
measured, published figures times sustained shares elsewhere. What had to be guessed is named in `Costs.warnings`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.footprint import Footprint
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.planner.recursion import Order, order_of, order_of_tasks
from hetero_megatron.planner.segments import BUCKET_ELEMENTS, Segment, Sync, finish, reductions, segments_of
from hetero_megatron.planner.stage_cost import StageCosts
from hetero_megatron.planner.unit_cost import Lengths, Seconds
from hetero_megatron.strategy import Pipeline, Strategy


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step is predicted to take.

    Attributes:
        seconds: the step.
        pipeline_seconds: until each pipeline's last backward ends.
        bound_seconds: all layers' work over the speed of all ranks in their places: no bubble, nothing exposed.
        busy: per pipeline and stage, seconds of computing.
        tail_seconds: from the last backward to the end: gradients, optimizer, parameters.
    """

    seconds: float
    pipeline_seconds: tuple[float, ...]
    bound_seconds: float
    busy: tuple[tuple[float, ...], ...]
    tail_seconds: float

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound."""
        return self.seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


class Costs(StageCosts):
    """Costs of one model's strategies on one cluster."""

    def __init__(
        self,
        config: LlamaConfig,
        cluster: Cluster,
        profiles: Profiles | None = None,
        seq_length: int = 4096,
        precision: str = "bf16",
        sequence_parallel: bool = True,
        context_parallel: str = "ring",
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`seq_length`: tokens of a row, for micro-batches given as rows; `bucket_elements`: a recipe's bucket_size."""
        profiles = profiles or Profiles()
        super().__init__(config, cluster, profiles, precision, sequence_parallel, context_parallel)
        self.seq_length, self.bucket_elements = seq_length, bucket_elements
        self._footprint = Footprint(config, cluster, seq_length, precision, sequence_parallel, profiles)

    def on(self, cluster: Cluster) -> "Costs":
        """The same model and settings on other devices."""
        return Costs(
            self.config,
            cluster,
            self.profiles,
            self.seq_length,
            self.precision,
            self.sequence_parallel,
            self.context_parallel,
            self.bucket_elements,
        )

    def segments(self, strategy: Strategy) -> tuple[Segment, ...]:
        """Runs of layers that the same stages hold, with the seconds of their gradients and parameters."""
        return segments_of(strategy, self.cluster, self.work, self.profiles, self.item, self.bucket_elements)

    def sync(self, strategy: Strategy) -> Sync:
        """Seconds of gradient reduction and parameter gathering, per pipeline and stage."""
        return Sync.of(strategy, self.segments(strategy))

    def optimizer(self, strategy: Strategy) -> tuple[tuple[float, ...], ...]:
        """Seconds of the update, per pipeline and stage."""
        return tuple(
            tuple(
                max(
                    self.update_seconds(kind, elements)
                    for part, elements in zip(self.shape(stage).parts, per_part, strict=True)
                    for kind in part.kinds
                )
                for stage, per_part in zip(pipeline.stages, own, strict=True)
            )
            for pipeline, own in zip(
                strategy.pipelines, self._footprint.updated_elements(strategy), strict=True
            )
        )

    def update_seconds(self, kind: str, elements: float) -> float:
        """Seconds of the optimizer for so many elements of one rank."""
        measured = self.profiles.update_seconds(kind, self.precision, elements)
        return self.work.update_seconds(self._kinds[kind], elements) if measured is None else measured

    def memory(self, strategy: Strategy, replicas: int | None = None) -> dict[int, int]:
        """Bytes per rank, never less than `memory.estimate` counts, and what driver and libraries take beside.

        `replicas`: over how many ZeRO-1 cuts, where these are not all pipelines of the strategy.
        """
        return {
            rank: parts.peak + self._reserved(rank)
            for rank, parts in self._footprint.per_rank(strategy, replicas).items()
        }

    def memory_parts(self, strategy: Strategy) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Per rank: bytes that are always there, and what one micro-batch keeps in each chunk."""
        return {
            rank: (parts.fixed + self._reserved(rank), parts.weights)
            for rank, parts in self._footprint.per_rank(strategy).items()
        }

    @property
    def footprint(self) -> Footprint:
        """The account of device memory."""
        return self._footprint

    def activation_bytes(self, strategy: Strategy) -> dict[int, int]:
        """Per rank: activations of all micro-batches in flight at the peak."""
        return {
            rank: sum(count * each for count, each in zip(parts.in_flight, parts.weights, strict=True))
            for rank, parts in self._footprint.per_rank(strategy).items()
        }

    def parameters(self, strategy: Strategy) -> dict[int, int]:
        """Per rank: elements of parameters."""
        found: dict[int, int] = {}
        for pipeline in strategy.pipelines:
            for place, stage in enumerate(pipeline.stages):
                ends = (place == 0, place == len(pipeline.stages) - 1)
                for part in stage.parts:
                    own, _ = self._footprint.elements(len(stage.layer_numbers), len(part), 1, *ends, False)
                    found.update(dict.fromkeys(part, own))
        return found

    def _reserved(self, rank: int) -> int:
        return self.profiles.reserved(self.cluster.kind(rank))

    def fixed(self, strategy: Strategy) -> float:
        """Seconds of every step beside computing and what was counted: the ranks agree on numbers, twice."""
        ranks = strategy.ranks
        kinds = {self.cluster.kind(rank).name for rank in ranks}
        known = max(self.profiles.fixed_seconds.get(name, 0.0) for name in kinds)
        if len(ranks) < 2:
            return known
        link = self.slowest_link(ranks)
        agree = self.profiles.latency(link, "all_reduce", len(ranks))
        return known + 2 * (2 * log2(len(ranks)) * link.latency_s if agree is None else agree)

    # A step

    def step(self, strategy: Strategy, lengths: Sequence[Sequence[Lengths]] | None = None) -> Estimate:
        """Predict a step.

        `lengths`: per pipeline, the documents of each micro-batch; None for rows of `seq_length` tokens.
        """
        segments = self.segments(strategy)
        gather = Sync.of(strategy, segments)
        ends: list[tuple[float, ...]] = []
        backward: list[tuple[float, ...]] = []
        busy: list[tuple[float, ...]] = []
        for number, pipeline in enumerate(strategy.pipelines):
            own = None if lengths is None else lengths[number]
            ended, last, computed = self._pipeline(strategy, number, pipeline, own, gather.behind[number])
            ends.append(ended)
            backward.append(last)
            busy.append(computed)
        synced = finish(reductions(segments, ends, backward), ends)
        updates = self.optimizer(strategy)
        together = max((end for own in synced for end in own), default=0.0)
        # All ranks agree on the gradient norm before one of them updates.
        seconds = together + self.fixed(strategy)
        seconds += max(
            (
                update + exposed
                for own, shown in zip(updates, gather.exposed, strict=True)
                for update, exposed in zip(own, shown, strict=True)
            ),
            default=0.0,
        )
        pipelines = tuple(max(own, default=0.0) for own in ends)
        return Estimate(
            seconds,
            pipelines,
            self.bound(strategy, lengths),
            tuple(busy),
            seconds - max(pipelines, default=0.0),
        )

    def full(self, pipeline: Pipeline) -> Lengths:
        """The documents of a micro-batch as large as the pipeline takes them, each as long as it may be."""
        whole, rest = divmod(pipeline.tokens(self.seq_length), self.seq_length)
        return (self.seq_length,) * whole + ((rest,) if rest else ())

    def _pipeline(
        self,
        strategy: Strategy,
        number: int,
        pipeline: Pipeline,
        lengths: Sequence[Lengths] | None,
        gather: tuple[float, ...],
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """When every stage ends, what its last backward takes, and how long it computes."""
        stages, count = pipeline.stages, pipeline.micro_batches if lengths is None else len(lengths)
        if not count:
            return (0.0,) * len(stages), (0.0,) * len(stages), (0.0,) * len(stages)
        order, late = self._order(strategy, number, pipeline, count), pipeline.chunks == 1
        if lengths is None or len(set(lengths)) == 1:
            documents = self.full(pipeline) if lengths is None else lengths[0]
            tokens, pairs = sum(documents), sum(length * length for length in documents)
            seconds = self._slots(pipeline, order, tokens, pairs)
            travel = [self.boundary(stages[a], stages[b], tokens) for a, b in order.boundaries]
            forward, backward, total = _by_stage(order, seconds, len(stages))
            # What arrives behind the first forward pass delays the stage only where it takes longer than the pass.
            ready = [max(0.0, arrives - first) for arrives, first in zip(gather, forward, strict=True)]
            return order.run(seconds, travel, ready, late), backward, tuple(count * each for each in total)
        sizes = [(sum(own), sum(length * length for length in own)) for own in lengths]
        columns = [self._slots(pipeline, order, *size) for size in sizes]
        journeys = [
            [self.boundary(stages[a], stages[b], tokens) for tokens, _ in sizes] for a, b in order.boundaries
        ]
        each = [_by_stage(order, column, len(stages)) for column in columns]
        ready = [max(0.0, arrives - first) for arrives, first in zip(gather, each[0][0], strict=True)]
        ends = order.run_varied(list(zip(*columns, strict=True)), journeys, ready, late)
        return ends, each[-1][1], tuple(map(sum, zip(*(total for *_, total in each), strict=True)))

    def _order(self, strategy: Strategy, number: int, pipeline: Pipeline, count: int) -> Order:
        if strategy.schedule_tasks:
            return order_of_tasks(strategy.schedule_tasks[number], pipeline.chunks)
        return order_of(strategy.schedule, len(pipeline.stages), count, pipeline.chunks)

    def _slots(self, pipeline: Pipeline, order: Order, tokens: int, pairs: int) -> list[float]:
        """Seconds of every slot of the order."""
        found = []
        for stage, kind, chunk in order.slots:
            one = self.chunk(pipeline, stage, chunk, tokens, pairs)
            found.append(one.forward if kind == "F" else one.backward)
        return found

    def bound(self, strategy: Strategy, lengths: Sequence[Sequence[Lengths]] | None = None) -> float:
        """Seconds in which the ranks, in their places, could do all layers' work with no bubble at all.

        Layers may go anywhere, embedding and head stay where they are: no schedule and no split of layers is faster.
        """
        work = speed = 0.0
        for number, pipeline in enumerate(strategy.pipelines):
            own = lengths[number] if lengths is not None else None
            if own is None:
                full = self.full(pipeline)
                size = (sum(full), sum(length * length for length in full))
                sizes = {size: pipeline.micro_batches}
            else:
                sizes = {}
                for documents in own:
                    size = (sum(documents), sum(length * length for length in documents))
                    sizes[size] = sizes.get(size, 0) + 1
            flops = {size: self.work.layer_flops(*size) for size in sizes}
            work += self.config.num_layers * sum(count * flops[size] for size, count in sizes.items())
            for place, stage in enumerate(pipeline.stages):
                shape = self.shape(stage)
                shares = pipeline.token_shares
                seconds = {size: self.slowest_part(shape, "layer", *size, shares) for size in sizes}
                rate = max((flops[size] / took for size, took in seconds.items() if took), default=0.0)
                speed += rate
                ends = [("embedding", place == 0), ("head", place == len(pipeline.stages) - 1)]
                for unit in (unit for unit, held in ends if held):
                    for size, count in sizes.items():
                        work += rate * count * self.slowest_part(shape, unit, *size, shares)
        return work / speed if speed else 0.0


def _by_stage(
    order: Order, seconds: Sequence[float], stages: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Per stage: its first forward, its last backward, and both passes of all its chunks."""
    forward, backward, total = [0.0] * stages, [0.0] * stages, [0.0] * stages
    for (stage, kind, chunk), own in zip(order.slots, seconds, strict=True):
        total[stage] += own
        if chunk == 0:
            (forward if kind == "F" else backward)[stage] = own
    return tuple(forward), tuple(backward), tuple(total)


__all__ = ["Costs", "Estimate", "Lengths", "Seconds"]
