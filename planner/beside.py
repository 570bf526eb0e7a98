"""Where the time of measured steps went, counted as the simulator counts it, so that both can stand side by side.

A span of communication is partly a wait for others: what is shared begins when the last one who takes part has come.
Until then it is bubble, from then on communication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import PlannerError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.planner.simulate import uncovered
from hetero_megatron.program import Program
from hetero_megatron.trace_file import TraceSpan


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one rank in a step, the mean of `steps` traced ones; the three add up to the step."""

    busy: float
    comm: float
    bubble: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The mean of traced steps."""

    seconds: float
    steps: int
    ranks: Mapping[int, Measured]


def measured_step(spans: Sequence[TraceSpan], program: Program) -> MeasuredStep:
    """What the traced steps of this program took.

    Raises:
        PlannerError: the trace has no step, or one of other ranks or other actions.
    """
    steps: dict[object, list[TraceSpan]] = {}
    for span in spans:
        steps.setdefault(span.notes.get("iteration"), []).append(span)
    if not steps or None in steps:
        raise PlannerError("the trace has no measured step; `pretrain --trace` records some")
    found = [_one(own, program) for own in steps.values()]
    count = len(found)
    ranks = {
        rank: Measured(*(sum(getattr(each[1][rank], part) for each in found) / count for part in PARTS))
        for rank in sorted(program.strategy.ranks)
    }
    return MeasuredStep(sum(seconds for seconds, _ in found) / count, count, ranks)


PARTS = ("busy", "comm", "bubble")


def _one(spans: Sequence[TraceSpan], program: Program) -> tuple[float, dict[int, Measured]]:
    by_rank: dict[int, list[TraceSpan]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    if set(by_rank) != set(program.strategy.ranks):
        raise PlannerError(
            f"the trace has ranks {ranges_text(by_rank)}, the strategy {ranges_text(program.strategy.ranks)}: it is of "
            "another strategy"
        )
    _check_actions(by_rank, program)
    began, ended = min(span.start for span in spans), max(span.end for span in spans)
    meetings = _Meetings(by_rank, program)
    found = {}
    for rank, own in by_rank.items():
        computed = [(span.start, span.end) for span in own if span.lane == "compute"]
        shared = [
            (min(span.end, max(span.start, meetings.begin(span))), span.end)
            for span in own
            if span.lane != "compute"
        ]
        busy, comm = sum(end - start for start, end in computed), uncovered(shared, computed)
        found[rank] = Measured(busy, comm, max(0.0, ended - began - busy - comm))
    return ended - began, found


def _check_actions(by_rank: Mapping[int, Sequence[TraceSpan]], program: Program) -> None:
    """Compare what ranks computed with the schedule; the number of micro-batches is the trace's own."""
    for rank, own in by_rank.items():
        names = [span.name for span in own if span.category in ("forward", "backward")]
        count = len({Action.parse(name).micro_batch for name in names})
        wanted = [str(step) for step in program.actions(rank, count) if isinstance(step, Action)]
        if names != wanted:
            raise PlannerError(
                f"rank {rank} computed {' '.join(names[:8])} ... in the trace, {' '.join(wanted[:8])} ... in the schedule: "
                "it is of another strategy"
            )


class _Meetings:
    """When the last of all who share a communication has come to it."""

    def __init__(self, by_rank: Mapping[int, Sequence[TraceSpan]], program: Program) -> None:
        self._program = program
        self._starts: dict[tuple[int, str], float] = {}
        for rank, own in by_rank.items():
            for span in own:
                self._starts.setdefault((rank, span.name), span.start)
        self._layers = {
            rank: set(stage.layer_numbers)
            for pipeline in program.strategy.pipelines
            for stage in pipeline.stages
            for rank in stage.ranks
        }

    def begin(self, span: TraceSpan) -> float:
        """In seconds; the span's own start for what is this rank's alone."""
        name = span.name
        if span.category == "receive":
            members, name = self._senders(span)
        elif span.category == "reduce":
            own = self._layers[span.rank]
            members = [rank for rank, layers in self._layers.items() if layers & own]
        elif span.category == "agree":
            everyone = name == "norm"
            members = list(self._layers if everyone else self._program.pipeline_of(span.rank)[1])
        else:
            return span.start
        return max((self._starts.get((rank, name), span.start) for rank in members), default=span.start)

    def _senders(self, span: TraceSpan) -> tuple[list[int], str]:
        program = self._program
        number, _ = program.pipeline_of(span.rank)
        stage = program.stage_of(span.rank)
        peer = program.schedule.pipelines[number].boundaries.peer(stage, Action.parse(span.name))
        if peer is None:
            return [], ""
        return list(program.strategy.pipelines[number].stages[peer[0]].ranks), str(peer[1])
