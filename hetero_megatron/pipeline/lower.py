"""From forwards and backwards to actions with communication, in one order on both ends (paper A.2)."""

from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.pipeline.action import Action, Batch, Step, receive_for, send_of, spell_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.schedule import Tasks
from hetero_megatron.pipeline.spans import Span, run_spans


@dataclass(frozen=True)
class PipelineActions:
    """What every stage of one pipeline does in one step: compute actions, and batches of messages between.

    All ranks of a stage follow the same actions; which rank talks to which is the boundary Reshard's
    CommPlan.
    """

    stages: tuple[tuple[Step, ...], ...]
    boundaries: Boundaries

    @cached_property
    def compute(self) -> Tasks:
        """The forwards and backwards alone, per stage."""
        return tuple(tuple(step for step in steps if isinstance(step, Action)) for steps in self.stages)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches stage 0 runs."""
        return len({action.micro_batch for action in self.compute[0] if action.kind == "F"})

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage}: {spell_steps(steps)}".rstrip() for stage, steps in enumerate(self.stages)
        )


def lower(tasks: Tasks, boundaries: Boundaries | None = None, early: bool | None = None) -> PipelineActions:
    """Insert the communication of one pipeline, in Batches between the compute actions.

    A result is sent right after it is computed. With one chunk per stage an input is received right before it is
    used, and all that falls between two compute actions is one Batch of at most one send and one receive. Where
    the last stage also feeds stage 0 that would hang: each would wait, with a message out, for the other's next
    receive. So with several chunks (or `early`) an input is received as soon as it is sent, before it is needed:
    every message gets the tick at which it is made when each action takes one tick, and stands at that tick on both
    ends. By induction over ticks no stage ever waits: before its batch of a tick it has only computed what started
    earlier, from messages of earlier batches.

    Either way the order of messages between two stages is the order of the compute actions that make them; `check`
    proves that the other end receives them in the same order. A message is everything that crosses the boundary for
    one micro-batch. `boundaries` are a chain of stages unless given.

    >>> from hetero_megatron.pipeline.schedule import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)))
    stage 0: F0 {SEND_F0 RECV_B0} B0
    stage 1: {RECV_F0} F0 B0 {SEND_B0}
    """
    chunks = 1 + max((action.chunk for stage in tasks for action in stage), default=0)
    if boundaries is None:
        boundaries = Boundaries.chain(len(tasks), chunks)
    if chunks > 1 if early is None else early:
        spans, waiting = run_spans(tasks, boundaries, lambda stage, action: 1.0)
        if waiting is None:
            return _weave_by_tick(spans, boundaries)
    return PipelineActions(
        tuple(_weave(stage, actions, boundaries) for stage, actions in enumerate(tasks)),
        boundaries,
    )


def _weave(stage: int, tasks: tuple[Action, ...], boundaries: Boundaries) -> tuple[Step, ...]:
    steps: list[Step] = []
    waiting: list[Action] = []
    for task in tasks:
        if boundaries.receives_from(stage, task) is not None:
            waiting.append(receive_for(task))
        if waiting:
            steps.append(Batch(tuple(waiting)))
        steps.append(task)
        waiting = [send_of(task)] if boundaries.sends_to(stage, task) is not None else []
    if waiting:
        steps.append(Batch(tuple(waiting)))
    return tuple(steps)


def _weave_by_tick(spans: tuple[tuple[Span, ...], ...], boundaries: Boundaries) -> PipelineActions:
    """Every message on both of its stages at the tick at which it is made; a stage's own send comes first."""
    messages: list[dict[float, list[Action]]] = [{} for _ in spans]
    for stage, span in ((stage, span) for stage, own in enumerate(spans) for span in own):
        if boundaries.sends_to(stage, span.action) is not None:
            sent = send_of(span.action)
            peer = boundaries.peer(stage, sent)
            assert peer is not None, f"{sent} of stage {stage} has a receiver"
            messages[stage].setdefault(span.end, []).insert(0, sent)
            messages[peer[0]].setdefault(span.end, []).append(peer[1])
    stages: list[tuple[Step, ...]] = []
    for own, moved in zip(spans, messages, strict=True):
        # Of one tick, what was just made or received comes before what starts.
        at: list[tuple[float, int, Step]] = [(tick, 0, Batch(tuple(items))) for tick, items in moved.items()]
        at += [(span.start, 1, span.action) for span in own]
        stages.append(tuple(step for *_, step in sorted(at, key=lambda each: each[:2])))
    return PipelineActions(tuple(stages), boundaries)
