"""One pipeline's stages, walking through their actions, event by event (paper A.1, A.2).

Communication is posted as the runtime posts it: sends go on behind what follows, a receive is waited for by the action
that needs it, and a message starts once both ends have posted it, which gloo and NCCL have in common. Messages follow the
boundary's CommPlan; each rank sends one, and receives one, at a time on each class of link.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.comm.steps import CommPlan, Transfer
from hetero_megatron.pipeline.action import Action, Step, receive_for
from hetero_megatron.planner.cost import Costs, Lengths
from hetero_megatron.program import Program

Message = tuple[int, int, float]
"""(sending rank, receiving rank, share of the tensor's elements)."""
Place = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Something that a whole stage does or waits for; `what` is compute, send, receive, reduce, gather, agree or update."""

    place: Place
    what: str
    name: str
    start: float
    end: float


class PipelineRun:
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
            start = max(now, arrived)
            # What has arrived before is there too, for no time: a trace has every action.
            self.spans.append(
                StageSpan((self._number, stage), "receive", str(key[1]), min(start, max(now, began)), start)
            )
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
        if item.is_send:
            # It goes on behind what follows.
            self.spans.append(StageSpan((self._number, stage), "send", str(item), now, now))
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
