"""When every forward and backward starts and ends, if each starts as soon as it can (paper §6.3, A.2)."""

from collections.abc import Callable
from dataclasses import dataclass

from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.schedule import Tasks


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action with its start and end, in seconds since the step began."""

    action: Action
    start: float
    end: float


Waiting = tuple[int, Action, int, Action]
"""(stage, its next action, stage, the action there whose output is missing)."""


def run_spans(
    tasks: Tasks, boundaries: Boundaries, seconds: Callable[[int, Action], float], comm_seconds: float = 0.0
) -> tuple[tuple[tuple[Span, ...], ...], Waiting | None]:
    """The spans of every stage, and who waits for what that never comes; None when all stages end.

    `seconds` gives what an action of a stage takes; a result reaches another stage `comm_seconds` after its end.
    """
    ended: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in tasks]

    def needs(stage: int, action: Action) -> list[tuple[int, Action]]:
        place = boundaries.input_of(stage, action)
        before = [] if place is None else [(place[0], Action(action.kind, action.micro_batch, place[1]))]
        own = [(stage, Action("F", action.micro_batch, action.chunk))] if action.kind == "B" else []
        return before + own

    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(tasks):
            while len(spans[stage]) < len(order):
                action = order[len(spans[stage])]
                inputs = needs(stage, action)
                if any(need not in ended for need in inputs):
                    break
                free = spans[stage][-1].end if spans[stage] else 0.0
                start = max([free] + [ended[need] + comm_seconds * (need[0] != stage) for need in inputs])
                span = Span(action, start, start + seconds(stage, action))
                spans[stage].append(span)
                ended[stage, action] = span.end
                moved = True
    waiting: Waiting | None = None
    for stage, order in enumerate(tasks):
        if waiting is None and len(spans[stage]) < len(order):
            action = order[len(spans[stage])]
            source, missing = next(need for need in needs(stage, action) if need not in ended)
            waiting = stage, action, source, missing
    return tuple(map(tuple, spans)), waiting
