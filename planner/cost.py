"""What a strategy costs, in closed forms and one small recursion: no Program is built (paper A.1).

Every time is that of the slowest rank that takes part. Times come from `Profiles`: measured where something was
measured, published figures times sustained shares elsewhere. What had to be guessed is named in `Costs.warnings`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from hetero_megatron.cluster import Cluster, DeviceKind, Link
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.curves import Curve
from hetero_megatron.planner.footprint import Footprint
from hetero_megatron.planner.profiles import Operation, Phase, Profiles, Unit
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.recursion import Order, order_of, order_of_tasks
from hetero_megatron.planner.segments import BUCKET_ELEMENTS, Segment, Sync, finish, reductions, segments_of
from hetero_megatron.planner.work import ITEM, Work
from hetero_megatron.strategy import Pipeline, Stage, Strategy

Lengths = tuple[int, ...]
"""Lengths of the documents of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(factor * self.forward, factor * self.backward)


NOTHING = Seconds(0.0, 0.0)


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


@dataclass(frozen=True, slots=True)
class PartShape:
    """A context-parallel part as the cost of its layers depends on it."""

    kinds: tuple[str, ...]
    tp: int
    link: Link


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage as its cost depends on it: no rank numbers."""

    parts: tuple[PartShape, ...]
    link: Link
    chunks: tuple[tuple[tuple[str, int], ...], ...]


class Costs:
    """Costs of one model on one cluster."""

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
        self.config, self.cluster, self.profiles = config, cluster, profiles or Profiles()
        self.seq_length, self.precision = seq_length, precision
        self.sequence_parallel, self.context_parallel = sequence_parallel, context_parallel
        self.bucket_elements = bucket_elements
        self.work, self.item = Work(config), ITEM[precision]
        self.warnings: dict[str, None] = {}
        self._kinds = {kind.name: kind for kind in cluster.kinds}
        self._curves: dict[tuple[str, int, int, Unit, Phase], tuple[Curve, bool]] = {}
        self._shapes: dict[Stage, StageShape] = {}
        self._chunks: dict[tuple[object, ...], Seconds] = {}
        self._units: dict[tuple[object, ...], Seconds] = {}
        self._footprint = Footprint(config, cluster, seq_length, precision, sequence_parallel, self.profiles)

    # One unit

    def layer(
        self,
        kind: str,
        tp: int,
        cp: int,
        link: Link,
        lengths: Lengths,
        recompute: str = "none",
        share: float | None = None,
    ) -> Seconds:
        """One transformer layer on a micro-batch of documents of these lengths, its TP and CP collectives included.

        `link`: the slowest between ranks of the stage. `share`: of the tokens that this part takes, 1 / cp unless given.
        """
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self._layer(kind, tp, cp, link, link, tokens, pairs, recompute, share or 1 / cp)

    def embedding(self, kind: str, tp: int, cp: int, lengths: Lengths) -> Seconds:
        """The embedding of a micro-batch."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self._unit(kind, tp, cp, "embedding", tokens, pairs, 1 / cp)

    def head(self, kind: str, tp: int, cp: int, lengths: Lengths) -> Seconds:
        """Final norm, head and loss of a micro-batch."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self._unit(kind, tp, cp, "head", tokens, pairs, 1 / cp)

    def curve(self, kind: str, tp: int, cp: int, unit: Unit, phase: Phase) -> tuple[Curve, bool]:
        """The time of a unit, and whether it is for whole micro-batches shared by `cp` parts (else for one part's)."""
        key = (kind, tp, cp, unit, phase)
        if key not in self._curves:
            self._curves[key] = self._find_curve(kind, tp, cp, unit, phase)
        return self._curves[key]

    def _find_curve(self, kind: str, tp: int, cp: int, unit: Unit, phase: Phase) -> tuple[Curve, bool]:
        device = self._kinds[kind]
        prior = self.work.curve(device, self.precision, tp, unit, phase)
        for parts in dict.fromkeys((cp, 1)):
            measured = self.profiles.curve(kind, self.precision, tp, parts, unit, phase, prior)
            if measured is not None:
                return measured, parts > 1
        degrees = [t for t, c in self.profiles.measured_degrees(kind, self.precision) if c == 1]
        for near in sorted(degrees, key=lambda each: abs(log2(each / tp))):
            base = self.work.curve(device, self.precision, near, unit, phase)
            measured = self.profiles.curve(kind, self.precision, near, 1, unit, phase, base)
            if measured is not None:
                self._warn(f"{kind}: TP{tp} was not measured; its {unit} is scaled from TP{near}")
                per_token = prior.per_token / base.per_token if base.per_token else 1.0
                return measured.scaled(per_token), False
        if self.profiles.measurements:
            self._warn(f"{kind} in {self.precision} was not measured; published figures stand in for it")
        return prior, False

    def _seconds(
        self,
        kind: str,
        tp: int,
        cp: int,
        unit: Unit,
        phase: Phase,
        tokens: float,
        pairs: float,
        share: float,
    ) -> float:
        curve, whole = self.curve(kind, tp, cp, unit, phase)
        factor = 1.0 if whole else share
        reason = curve.outside(tokens * factor, pairs / tokens if tokens else 0)
        if reason:
            self._warn(f"{kind} TP{tp}: {unit} for {reason}; beyond what was measured this is a guess")
        return curve.seconds(tokens * factor, pairs * factor)

    def _unit(
        self, kind: str, tp: int, cp: int, unit: Unit, tokens: int, pairs: int, share: float
    ) -> Seconds:
        key = (kind, tp, cp, unit, tokens, pairs, share)
        if key not in self._units:
            self._units[key] = Seconds(
                self._seconds(kind, tp, cp, unit, "forward", tokens, pairs, share),
                self._seconds(kind, tp, cp, unit, "backward", tokens, pairs, share),
            )
        return self._units[key]

    def _layer(
        self,
        kind: str,
        tp: int,
        cp: int,
        tp_link: Link,
        cp_link: Link,
        tokens: int,
        pairs: int,
        recompute: str,
        share: float,
    ) -> Seconds:
        key = (kind, tp, cp, tp_link, cp_link, tokens, pairs, recompute, share)
        known = self._units.get(key)
        if known is not None:
            return known
        plain = self._unit(kind, tp, cp, "layer", tokens, pairs, share)
        tensor = self._tensor_parallel(self._kinds[kind], tp, tp_link, tokens * share)
        context = NOTHING
        if cp > 1 and not self.curve(kind, tp, cp, "layer", "forward")[1]:
            context = self._context(kind, tp, cp, cp_link, tokens, pairs, share)
        forward = plain.forward + tensor + context.forward
        backward = plain.backward + tensor + context.backward
        if recompute == "full":
            backward += forward
        elif recompute == "selective":
            again = self.work.recomputed(self._kinds[kind], self.precision, tp)
            backward += again.seconds(tokens * share, pairs * share) + context.forward
        self._units[key] = found = Seconds(forward, backward)
        return found

    def _tensor_parallel(self, kind: DeviceKind, tp: int, link: Link, tokens: float) -> float:
        """What a slower link than the node's own adds to one pass; the node's own is in the measured or inferred rate."""
        if tp == 1 or bytes_per_second(link) >= bytes_per_second(kind.link):
            return 0.0
        size = tokens * self.config.hidden_size * self.item
        gather_and_scatter: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
        operations = gather_and_scatter if self.sequence_parallel else ("all_reduce",)
        slow, fast = (
            sum(self.profiles.transfer_seconds(way, each, tp, size) for each in operations)
            for way in (link, kind.link)
        )
        return 2 * (slow - fast)

    def _context(
        self, kind: str, tp: int, cp: int, link: Link, tokens: int, pairs: int, share: float
    ) -> Seconds:
        """Context-parallel exchanges that attention does not hide: ring behind its blocks, Ulysses before and after."""
        config = self.config
        if self.context_parallel == "ulysses":
            sent = tokens * share * (2 * config.query_size + 2 * config.kv_size) / tp * (cp - 1) / cp
            seconds = self.profiles.transfer_seconds(link, "p2p", 2, sent * self.item)
            return Seconds(seconds, seconds)
        received = tokens * (1 - share) * 2 * config.kv_size / tp * self.item
        once = self.profiles.transfer_seconds(link, "p2p", 2, received)
        hidden = [
            0.0 if kind == "cpu" else self.curve(kind, tp, cp, "layer", phase)[0].per_pair * pairs * share
            for phase in ("forward", "backward")
        ]
        return Seconds(max(0.0, once - hidden[0]), max(0.0, 2 * once - hidden[1]))

    # Stages

    def shape(self, stage: Stage) -> StageShape:
        """What the cost of a stage depends on."""
        known = self._shapes.get(stage)
        if known is None:
            parts = tuple(self._part(part) for part in stage.parts)
            between = self._slowest([part[0] for part in stage.parts])
            chunks = []
            for first, last in stage.chunks:
                kinds: dict[str, int] = {}
                for layer in range(first, last + 1):
                    kinds[stage.recompute_of(layer)] = kinds.get(stage.recompute_of(layer), 0) + 1
                chunks.append(tuple(kinds.items()))
            self._shapes[stage] = known = StageShape(parts, between, tuple(chunks) or ((),))
        return known

    def _part(self, ranks: tuple[int, ...]) -> PartShape:
        kinds = tuple(dict.fromkeys(self.cluster.kind(rank).name for rank in ranks))
        return PartShape(kinds, len(ranks), self._slowest(ranks))

    def _slowest(self, ranks: Sequence[int]) -> Link:
        """The slowest link between neighbours of a ring of ranks."""
        if len(ranks) < 2:
            return self.cluster.kind(ranks[0]).link
        links = [
            self.cluster.link(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True) if a != b
        ]
        return min(links, key=bytes_per_second)

    def stage(self, stage: Stage, lengths: Lengths, first: bool, last: bool) -> Seconds:
        """All layers of a stage on one micro-batch, the embedding on the first and the head on the last stage."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        sizes = stage.tensor_parallel_sizes
        shape = self.shape(stage)
        found = NOTHING
        for number in range(len(shape.chunks)):
            ends = (first and number == 0, last and number == len(shape.chunks) - 1)
            found = found + self._chunk(shape, number, tokens, pairs, sizes, *ends)
        return found

    def _chunk(
        self,
        shape: StageShape,
        number: int,
        tokens: int,
        pairs: int,
        shares: tuple[int, ...],
        first: bool,
        last: bool,
    ) -> Seconds:
        key = (shape, number, tokens, pairs, shares, first, last)
        known = self._chunks.get(key)
        if known is None:
            total = sum(shares)
            each = [
                self._part_chunk(shape, part, kind, number, tokens, pairs, share / total, first, last)
                for part, share in zip(shape.parts, shares, strict=True)
                for kind in part.kinds
            ]
            known = Seconds(max(one.forward for one in each), max(one.backward for one in each))
            self._chunks[key] = known
        return known

    def _part_chunk(
        self,
        shape: StageShape,
        part: PartShape,
        kind: str,
        number: int,
        tokens: int,
        pairs: int,
        share: float,
        first: bool,
        last: bool,
    ) -> Seconds:
        cp, forward, backward = len(shape.parts), 0.0, 0.0
        for recompute, count in shape.chunks[number]:
            one = self._layer(kind, part.tp, cp, part.link, shape.link, tokens, pairs, recompute, share)
            forward += count * one.forward
            backward += count * one.backward
        for unit, held in (("embedding", first), ("head", last)):
            if held:
                one = self._unit(kind, part.tp, cp, unit, tokens, pairs, share)  # type: ignore[arg-type]
                forward += one.forward
                backward += one.backward
        return Seconds(forward, backward)

    # Between stages

    def boundary(self, sender: Stage, receiver: Stage, tokens: int) -> float:
        """Seconds that one micro-batch's activations, or their gradients, travel between two stages.

        Each part sends to the part of its number; where their TP differs, the side with fewer ranks takes longer.
        """
        slowest = 0.0
        total = len(sender.ranks)
        for out, into in zip(sender.parts, receiver.parts, strict=True):
            size = tokens * len(out) / total * self.config.hidden_size * self.item
            if self.sequence_parallel:
                size /= min(len(out), len(into))
            link = min(
                (self.cluster.link(out[0], into[0]), self.cluster.link(out[-1], into[-1])),
                key=bytes_per_second,
            )
            if link.shared:
                size *= max(len(out), len(into)) if not self.sequence_parallel else min(len(out), len(into))
            slowest = max(slowest, self.profiles.transfer_seconds(link, "p2p", 2, size))
        return slowest

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
                    self._update(kind, elements)
                    for part, elements in zip(self.shape(stage).parts, per_part, strict=True)
                    for kind in part.kinds
                )
                for stage, per_part in zip(pipeline.stages, own, strict=True)
            )
            for pipeline, own in zip(
                strategy.pipelines, self._footprint.updated_elements(strategy), strict=True
            )
        )

    def _update(self, kind: str, elements: float) -> float:
        measured = self.profiles.update_seconds(kind, self.precision, elements)
        return self.work.update_seconds(self._kinds[kind], elements) if measured is None else measured

    def memory(self, strategy: Strategy, replicas: int | None = None) -> dict[int, int]:
        """Bytes per rank, never less than `memory.estimate` counts, and what the profile says is taken beside.

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
        return int(self.profiles.reserved_bytes.get(self.cluster.kind(rank).name, 0))

    def fixed(self, strategy: Strategy) -> float:
        """Seconds of every step beside computing and what was counted: the ranks agree on numbers, twice."""
        ranks = strategy.ranks
        kinds = {self.cluster.kind(rank).name for rank in ranks}
        known = max(self.profiles.fixed_seconds.get(name, 0.0) for name in kinds)
        if len(ranks) < 2:
            return known
        link = self._slowest(ranks)
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
            tokens = pipeline.micro_batch_size * self.seq_length
            pairs = tokens * self.seq_length
            if lengths is not None:
                tokens, pairs = sum(lengths[0]), sum(length * length for length in lengths[0])
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

    def chunk(self, pipeline: Pipeline, stage: int, chunk: int, tokens: int, pairs: int) -> Seconds:
        """One chunk of one stage on a micro-batch of so many tokens and pairs, its share of embedding and head included."""
        first = stage == 0 and chunk == 0
        last = stage == len(pipeline.stages) - 1 and chunk == pipeline.chunks - 1
        shape = self.shape(pipeline.stages[stage])
        return self._chunk(shape, chunk, tokens, pairs, pipeline.token_shares, first, last)

    def bound(self, strategy: Strategy, lengths: Sequence[Sequence[Lengths]] | None = None) -> float:
        """Seconds in which the ranks, in their places, could do all layers' work with no bubble at all.

        Layers may go anywhere, embedding and head stay where they are: no schedule and no split of layers is faster.
        """
        work = speed = 0.0
        for number, pipeline in enumerate(strategy.pipelines):
            own = lengths[number] if lengths is not None else None
            if own is None:
                tokens = pipeline.micro_batch_size * self.seq_length
                sizes = {(tokens, tokens * self.seq_length): pipeline.micro_batches}
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
                seconds = {size: self._slowest_part(shape, "layer", *size, shares) for size in sizes}
                rate = max((flops[size] / took for size, took in seconds.items() if took), default=0.0)
                speed += rate
                ends = [("embedding", place == 0), ("head", place == len(pipeline.stages) - 1)]
                for unit in (unit for unit, held in ends if held):
                    for size, count in sizes.items():
                        work += rate * count * self._slowest_part(shape, unit, *size, shares)
        return work / speed if speed else 0.0

    def _slowest_part(
        self, shape: StageShape, unit: str, tokens: int, pairs: int, shares: tuple[int, ...]
    ) -> float:
        """Both passes of one unit on the slowest part of a stage."""
        cp, total, slowest = len(shape.parts), sum(shares), 0.0
        for part, share in zip(shape.parts, shares, strict=True):
            for kind in part.kinds:
                if unit == "layer":
                    one = self._layer(
                        kind, part.tp, cp, part.link, shape.link, tokens, pairs, "none", share / total
                    )
                else:
                    one = self._unit(kind, part.tp, cp, unit, tokens, pairs, share / total)  # type: ignore[arg-type]
                slowest = max(slowest, one.total)
        return slowest

    def _warn(self, text: str) -> None:
        self.warnings[text] = None


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
