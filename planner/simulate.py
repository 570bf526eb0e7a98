"""An event simulation of one step: the very actions that the runtime executes, message by message (paper A.1, A.2).

Every stage walks through `Program.actions` (`planner/events.py`). On the tail gradients are reduced segment by segment, all
ranks agree on their norm, and every rank updates. Parameters of the step before arrive behind the first forward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.errors import PlannerError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.planner.cost import Costs, Lengths
from hetero_megatron.planner.events import PipelineRun, Place, StageSpan
from hetero_megatron.planner.segments import Sync, finish, reductions
from hetero_megatron.program import Program
from hetero_megatron.trace_file import LANES, TraceCounter, TraceSpan, rank_title


@dataclass(frozen=True, slots=True)
class RankReport:
    """Where the time of one rank's step goes; `busy`, `comm` and `bubble` add up to the step.

    Attributes:
        busy: seconds of forward, backward and update, collectives inside layers included.
        comm: seconds in which nothing but communication held the rank up.
        bubble: seconds of waiting for other stages and pipelines.
        memory_peak: bytes.
    """

    rank: int
    kind: str
    pipeline: int
    stage: int
    busy: float
    comm: float
    bubble: float
    memory_peak: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step."""

    seconds: float
    bound: float
    ranks: tuple[RankReport, ...]
    spans: tuple[StageSpan, ...]
    memory: Mapping[int, tuple[tuple[float, int], ...]]
    places: Mapping[Place, tuple[int, ...]]

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    def as_json(self) -> dict[str, object]:
        """What `simulate --json` prints."""
        return {
            "step_seconds": self.seconds,
            "bound_seconds": self.bound,
            "ranks": [
                {
                    "rank": each.rank,
                    "busy": each.busy,
                    "comm": each.comm,
                    "bubble": each.bubble,
                    "memory_peak_bytes": each.memory_peak,
                }
                for each in self.ranks
            ],
        }

    def trace_spans(self) -> tuple[TraceSpan, ...]:
        """The spans of every rank, for `trace_file`."""
        return tuple(
            TraceSpan(
                rank,
                LANES.get(_category(span), "communication"),
                span.name,
                _category(span),
                span.start,
                span.end,
            )
            for span in self.spans
            for rank in self.places[span.place]
        )

    def trace_counters(self) -> tuple[TraceCounter, ...]:
        """Memory of every rank over time."""
        return tuple(TraceCounter(rank, "memory bytes", own) for rank, own in self.memory.items())

    def trace_names(self) -> dict[int, str]:
        """What each rank is called in a trace."""
        return {each.rank: rank_title(each.rank, each.kind, each.pipeline, each.stage) for each in self.ranks}


def _category(span: StageSpan) -> str:
    if span.what == "compute":
        return "forward" if span.name.startswith("F") else "backward"
    return span.what


def simulate(
    program: Program, costs: Costs, lengths: Sequence[Sequence[Lengths]] | None = None
) -> Simulation:
    """Run one step of `program` without devices.

    `lengths`: per pipeline, the documents of each micro-batch; None for micro-batches as large as the strategy allows.

    Raises:
        PlannerError: micro-batches are given for another number of pipelines.
    """
    strategy = program.strategy
    if lengths is not None and len(lengths) != len(strategy.pipelines):
        raise PlannerError(
            f"micro-batches are given for {len(lengths)} pipelines, the strategy has {len(strategy.pipelines)}"
        )
    segments = costs.segments(strategy)
    gather = Sync.of(strategy, segments)
    spans: list[StageSpan] = []
    ends: list[tuple[float, ...]] = []
    backward: list[tuple[float, ...]] = []
    for number, pipeline in enumerate(strategy.pipelines):
        full = (costs.full(pipeline),) * pipeline.micro_batches
        run = PipelineRun(program, costs, number, full if lengths is None else lengths[number])
        run.play(gather.behind[number])
        spans += run.spans
        ends.append(run.ends)
        backward.append(run.last_backward)
    reduced = reductions(segments, ends, backward)
    for segment, begin, over in reduced:
        spans += [StageSpan(place, "reduce", "gradients", begin, over) for place in set(segment.members)]
    for number, own in enumerate(gather.behind):
        spans += [
            StageSpan((number, stage), "gather", "parameters", 0.0, took)
            for stage, took in enumerate(own)
            if took
        ]
    together = max((end for own in finish(reduced, ends) for end in own), default=0.0)
    agreed = together + costs.fixed(strategy)
    seconds = agreed
    updates = costs.optimizer(strategy)
    for number, own in enumerate(updates):
        for stage, took in enumerate(own):
            place, exposed = (number, stage), gather.exposed[number][stage]
            spans.append(StageSpan(place, "agree", "norm", together, agreed))
            spans.append(StageSpan(place, "update", "update", agreed, agreed + took))
            if exposed:
                spans.append(StageSpan(place, "gather", "parameters", agreed + took, agreed + took + exposed))
            seconds = max(seconds, agreed + took + exposed)
    return _report(program, costs, spans, seconds, costs.bound(strategy, lengths))


def _report(
    program: Program, costs: Costs, spans: Sequence[StageSpan], seconds: float, bound: float
) -> Simulation:
    strategy = program.strategy
    places = {
        (number, place): stage.ranks
        for number, pipeline in enumerate(strategy.pipelines)
        for place, stage in enumerate(pipeline.stages)
    }
    busy: dict[Place, float] = dict.fromkeys(places, 0.0)
    covered: dict[Place, list[tuple[float, float]]] = {place: [] for place in places}
    other: dict[Place, list[tuple[float, float]]] = {place: [] for place in places}
    for span in spans:
        if span.what in ("compute", "update"):
            busy[span.place] += span.end - span.start
            covered[span.place].append((span.start, span.end))
        else:
            other[span.place].append((span.start, span.end))
    comm = {place: uncovered(other[place], covered[place]) for place in places}
    parts = costs.memory_parts(strategy)
    ranks, memory = [], {}
    for place, own in places.items():
        waited = max(0.0, seconds - busy[place] - comm[place])
        timelines: dict[tuple[int, ...], list[tuple[float, int]]] = {}
        for rank in own:
            fixed, weights = parts[rank]
            if weights not in timelines:
                timelines[weights] = _in_flight(spans, place, weights)
            memory[rank] = tuple((at, fixed + each) for at, each in timelines[weights])
            peak = max(value for _, value in memory[rank])
            kind = costs.cluster.kind(rank).name
            ranks.append(RankReport(rank, kind, *place, busy[place], comm[place], waited, peak))
    return Simulation(
        seconds,
        bound,
        tuple(sorted(ranks, key=lambda each: each.rank)),
        tuple(sorted(spans, key=lambda span: (span.start, span.place))),
        dict(sorted(memory.items())),
        places,
    )


def uncovered(spans: Sequence[tuple[float, float]], covered: Sequence[tuple[float, float]]) -> float:
    """Length of the union of `spans` that no span of `covered` overlaps."""
    edges = [(at, 0, step) for start, end in spans for at, step in ((start, 1), (end, -1))]
    edges += [(at, 1, step) for start, end in covered for at, step in ((start, 1), (end, -1))]
    depth, before, total = [0, 0], 0.0, 0.0
    for at, layer, step in sorted(edges):
        if depth[0] > 0 and depth[1] == 0:
            total += at - before
        depth[layer] += step
        before = at
    return total


def _in_flight(spans: Sequence[StageSpan], place: Place, weights: Sequence[int]) -> list[tuple[float, int]]:
    """Bytes of activations over time: a micro-batch's are kept from the start of its forward to the end of its backward."""
    changes: list[tuple[float, int]] = [(0.0, 0)]
    for span in spans:
        if span.place == place and span.what == "compute":
            action = Action.parse(span.name)
            weight = weights[action.chunk]
            changes.append((span.start, weight) if action.kind == "F" else (span.end, -weight))
    found: list[tuple[float, int]] = []
    now = 0
    for at, change in sorted(changes):
        now += change
        if found and found[-1][0] == at:
            found[-1] = (at, now)
        else:
            found.append((at, now))
    return found
