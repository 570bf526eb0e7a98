"""An event simulation of one step: the very actions that the runtime executes, message by message (paper A.1, A.2).

Every stage walks through `Program.actions`. Communication is posted as the runtime posts it: sends go on behind what
follows, a receive is waited for by the action that needs it, and a message starts once both ends have posted it, which
gloo and NCCL have in common. Messages follow the boundary's CommPlan; each rank sends one, and receives one, at a time on
each class of link. On the tail gradients are reduced segment by segment, all ranks agree on their norm, and every rank
updates. Parameters of the step before arrive behind the first forward pass.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.comm.steps import CommPlan, Transfer
from hetero_megatron.errors import PlannerError
from hetero_megatron.pipeline.action import Action, Step, receive_for
from hetero_megatron.planner.cost import Costs, Lengths
from hetero_megatron.planner.segments import Sync, finish, reductions
from hetero_megatron.program import Program
from hetero_megatron.trace_file import TraceCounter, TraceSpan

Message = tuple[int, int, float]
"""(sending rank, receiving rank, share of the tensor's elements)."""
Place = tuple[int, int]
"""(pipeline, stage)."""


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
class StageSpan:
    """Something that a whole stage does or waits for; `what` is compute, receive, reduce, gather, agree or update."""

    place: Place
    what: str
    name: str
    start: float
    end: float


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
        lanes = {"compute": "compute", "update": "compute"}
        return tuple(
            TraceSpan(
                rank,
                lanes.get(span.what, "communication"),
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
        return {
            each.rank: f"rank {each.rank}: {each.kind}, pipeline {each.pipeline} stage {each.stage}"
            for each in self.ranks
        }


def _category(span: StageSpan) -> str:
    if span.what == "compute":
        return "forward" if span.name.startswith("F") else "backward"
    return span.what


def simulate(
    program: Program, costs: Costs, lengths: Sequence[Sequence[Lengths]] | None = None
) -> Simulation:
    """Run one step of `program` without devices.

    `lengths`: per pipeline, the documents of each micro-batch; None for full micro-batches of whole rows.

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
        rows = ((costs.seq_length,) * pipeline.micro_batch_size,) * pipeline.micro_batches
        run = _PipelineRun(program, costs, number, rows if lengths is None else lengths[number])
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


class _PipelineRun:
    """One pipeline's stages, walking through their actions."""

    def __init__(self, program: Program, costs: Costs, number: int, batches: Sequence[Lengths]) -> None:
        self._costs, self._number, self._pipeline = costs, number, program.strategy.pipelines[number]
        ranks = [stage.ranks for stage in self._pipeline.stages]
        self._steps: list[tuple[Step, ...]] = [program.actions(own[0], len(batches)) for own in ranks]
        self._boundaries = program.schedule.pipelines[number].boundaries
        self._messages = _messages(program, number)
        self._tokens = [sum(own) for own in batches]
        self._pairs = [sum(length * length for length in own) for own in batches]
        self.spans: list[StageSpan] = []
        count = len(ranks)
        self._at, self._free = [0] * count, [0.0] * count
        self._posted: dict[tuple[int, Action], float] = {}
        self._arrived: dict[tuple[int, Action], tuple[float, float]] = {}
        self._waiting: dict[tuple[int, Action], int] = {}
        self._ports: dict[tuple[int, bool, str], float] = {}
        self._events: list[tuple[float, int, int, tuple[int, Action] | None]] = []
        self._count = 0
        self._late: dict[int, float] = {}
        self._last: dict[int, float] = {}

    @property
    def ends(self) -> tuple[float, ...]:
        """When every stage is done."""
        return tuple(self._free)

    @property
    def last_backward(self) -> tuple[float, ...]:
        """Seconds of every stage's last backward."""
        return tuple(self._last.get(stage, 0.0) for stage in range(len(self._steps)))

    def play(self, gather: Sequence[float]) -> None:
        """Walk all stages to their ends; parameters arrive `gather` seconds after the start."""
        for stage in range(len(self._steps)):
            first = self._seconds(stage, Action("F", 0)) if self._tokens else 0.0
            self._late[stage] = max(0.0, gather[stage] - first)
            self._push(0.0, stage, None)
        while self._events:
            at, _, stage, message = heapq.heappop(self._events)
            if message is None:
                self._advance(stage, at)
            else:
                self._travel(stage, message[1], at)
        for stage, steps in enumerate(self._steps):
            assert self._at[stage] == len(steps), f"stage {stage} stopped at {steps[self._at[stage]]}"

    def _push(self, at: float, stage: int, message: tuple[int, Action] | None) -> None:
        heapq.heappush(self._events, (at, self._count, stage, message))
        self._count += 1

    def _advance(self, stage: int, now: float) -> None:
        """The next step of a stage that is free; later steps follow by events, so that queues see one clock."""
        if self._at[stage] == len(self._steps[stage]):
            return
        step = self._steps[stage][self._at[stage]]
        if not isinstance(step, Action):
            self._at[stage] += 1
            for item in step.items:
                self._post(stage, item, now)
            self._push(now, stage, None)
            return
        start = now
        if self._boundaries.receives_from(stage, step) is not None:
            key = (stage, receive_for(step))
            if key not in self._arrived:
                self._waiting[key] = stage
                return
            began, arrived = self._arrived.pop(key)
            if arrived > now:
                self.spans.append(
                    StageSpan((self._number, stage), "receive", str(key[1]), max(now, began), arrived)
                )
                start = arrived
        if stage in self._late:
            start = max(start, self._late.pop(stage))
        took = self._seconds(stage, step)
        self.spans.append(StageSpan((self._number, stage), "compute", str(step), start, start + took))
        if step.kind == "B":
            self._last[stage] = took
        self._at[stage] += 1
        self._free[stage] = start + took
        self._push(start + took, stage, None)

    def _post(self, stage: int, item: Action, now: float) -> None:
        self._posted[stage, item] = now
        peer = self._boundaries.peer(stage, item)
        assert peer is not None, f"{item} of stage {stage} has a peer: the schedule was checked"
        if peer in self._posted:
            receiver = peer if item.is_send else (stage, item)
            self._push(now, receiver[0], receiver)

    def _travel(self, stage: int, receive: Action, now: float) -> None:
        """All messages that make up one result, queued behind what the same ranks have on the same links."""
        peer = self._boundaries.peer(stage, receive)
        assert peer is not None, f"{receive} of stage {stage} has a peer: the schedule was checked"
        forward, cluster = receive.kind == "RECV_F", self._costs.cluster
        arrived = now
        size = self._tokens[receive.micro_batch] * self._costs.config.hidden_size * self._costs.item
        for src, dst, share in self._messages.get((peer[0], stage, forward), ()):
            link = cluster.link(src, dst)
            took = self._costs.profiles.transfer_seconds(link, "p2p", 2, share * size)
            ports = tuple(
                (cluster.node_of(rank) if link.shared else rank, leaves, link.name)
                for rank, leaves in ((src, True), (dst, False))
            )
            end = max(now, *(self._ports.get(port, 0.0) for port in ports)) + took
            self._ports.update(dict.fromkeys(ports, end))
            arrived = max(arrived, end)
        self._arrived[stage, receive] = (now, arrived)
        if (stage, receive) in self._waiting:
            self._push(now, self._waiting.pop((stage, receive)), None)

    def _seconds(self, stage: int, action: Action) -> float:
        tokens, pairs = self._tokens[action.micro_batch], self._pairs[action.micro_batch]
        one = self._costs.chunk(self._pipeline, stage, action.chunk, tokens, pairs)
        return one.forward if action.kind == "F" else one.backward


def _messages(program: Program, number: int) -> dict[tuple[int, int, bool], list[Message]]:
    """Messages from stage to stage, forward and backward; shares are of one micro-batch of the pipeline."""
    places = {rank: stage for stage, ranks in enumerate(program.pipelines[number]) for rank in ranks}
    shares = program.strategy.pipelines[number].token_shares
    found: dict[tuple[int, int, bool], list[Message]] = {}
    plans: list[tuple[CommPlan | None, bool, int]] = []
    for reshard in program.reshards:
        parts = program.plan[reshard.name].hsize
        plans += [(reshard.forward, True, parts), (reshard.backward, False, parts)]
    seen: set[tuple[int, bool]] = set()
    for plan, forward, parts in plans:
        if plan is None or (id(plan), forward) in seen:
            continue
        seen.add((id(plan), forward))
        own: dict[tuple[int, int, bool], list[Message]] = {}
        for step in (step for stage in plan.stages for step in stage.steps):
            if not isinstance(step, Transfer) or step.src not in places or step.dst not in places:
                continue
            if places[step.src] != places[step.dst]:
                # Every part counts its own tokens: its share of the tensor is taken as one of `parts` equal ones.
                share = float(step.region.volume()) * parts * _token_share(program, step.src, shares)
                own.setdefault((places[step.src], places[step.dst], forward), []).append(
                    (step.src, step.dst, share)
                )
        for key, messages in own.items():
            found.setdefault(key, messages)
    return found


def _token_share(program: Program, rank: int, shares: tuple[int, ...]) -> float:
    return shares[program.part_of(rank)] / sum(shares)


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
    comm = {place: _uncovered(other[place], covered[place]) for place in places}
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


def _uncovered(spans: list[tuple[float, float]], covered: list[tuple[float, float]]) -> float:
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
