"""From forwards and backwards to actions with communication, in one order on both ends (paper A.2)."""

from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.pipeline.action import Action, Batch, Step, receive_for, send_of, spell_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.schedule import Tasks


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


def lower(tasks: Tasks, boundaries: Boundaries | None = None) -> PipelineActions:
    """Insert the communication of one pipeline: all that falls between two compute actions is one Batch.

    A result is sent right after it is computed and an input is received right before it is used, so a batch
    holds at most one send and one receive, and the order of messages between two stages is the order of the
    compute actions that make them; `check` proves that the other end needs them in the same order. A
    message is everything that crosses the boundary for one micro-batch. `boundaries` are a chain of stages
    unless given.

    >>> from hetero_megatron.pipeline.schedule import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)))
    stage 0: F0 {SEND_F0 RECV_B0} B0
    stage 1: {RECV_F0} F0 B0 {SEND_B0}
    """
    if boundaries is None:
        chunks = 1 + max((action.chunk for stage in tasks for action in stage), default=0)
        boundaries = Boundaries.chain(len(tasks), chunks)
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
