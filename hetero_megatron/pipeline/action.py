"""The units of a pipeline schedule: computing and communicating one micro-batch (paper §6.3, A.2)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from hetero_megatron.errors import ScheduleError

ComputeKind = Literal["F", "B"]
Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BY_NAME: dict[str, Kind] = {kind: kind for kind in KINDS}
_SPELLING = re.compile(r"([A-Z_]+)(0|[1-9]\d*)(?:\.([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a stage does for one micro-batch, spelt `F0`, `B3`, `SEND_F0` or `RECV_B1`.

    `F` and `B` are forward and backward; `SEND_F` passes an activation on, `SEND_B` a gradient back.
    `chunk` counts the parts of the model on this stage (0 unless the schedule interleaves) and is spelt
    `F0.1` when it is not 0; a communication names the chunk that it feeds or drains on its own stage.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _BY_NAME:
            raise ScheduleError(f"action kind {self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.micro_batch < 0 or self.chunk < 0:
            raise ScheduleError(
                f"action {self}: micro-batch {self.micro_batch} and chunk {self.chunk} count from 0"
            )

    @property
    def is_compute(self) -> bool:
        """Whether this is a forward or a backward, not communication."""
        return len(self.kind) == 1

    @property
    def is_send(self) -> bool:
        """Whether this sends."""
        return self.kind.startswith("SEND")

    @property
    def payload(self) -> str:
        """What is computed or moved, without the direction: `F0` for SEND_F0, RECV_F0 and F0."""
        return f"{self.kind[-1]}{self.micro_batch}{f'.{self.chunk}' if self.chunk else ''}"

    @staticmethod
    def parse(text: str) -> "Action":
        """The action that prints as `text`."""
        match = _SPELLING.fullmatch(text)
        kind = _BY_NAME.get(match[1]) if match else None
        if match is None or kind is None:
            raise ScheduleError(
                f"{text!r} is no action: write one of {', '.join(KINDS)} and a micro-batch, "
                "such as F0, or F0.1 for chunk 1"
            )
        return Action(kind, int(match[2]), int(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}{f'.{self.chunk}' if self.chunk else ''}"


def receive_for(task: Action) -> Action:
    """The receive that brings the input of a compute action: RECV_F2 for F2."""
    return Action("RECV_F" if task.kind == "F" else "RECV_B", task.micro_batch, task.chunk)


def send_of(task: Action) -> Action:
    """The send that takes the output of a compute action away: SEND_B2 for B2."""
    return Action("SEND_F" if task.kind == "F" else "SEND_B", task.micro_batch, task.chunk)


@dataclass(frozen=True, slots=True)
class Batch:
    """Communication that is posted together, as `batch_isend_irecv` does, spelt `{SEND_F1 RECV_B0}`.

    It is complete when every item is matched by its peer. A transport with asynchronous sends may go on as
    soon as the receives are complete.
    """

    items: tuple[Action, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ScheduleError("a batch without items: leave it out")
        for item in self.items:
            if item.is_compute:
                raise ScheduleError(
                    f"batch {self} holds {item}, which computes; a batch holds sends and receives only"
                )

    def __str__(self) -> str:
        return "{" + " ".join(map(str, self.items)) + "}"


Step = Action | Batch


def parse_steps(text: str) -> tuple[Step, ...]:
    """The steps of one stage as `spell_steps` prints them.

    >>> parse_steps("F0 {SEND_F0 RECV_B0} B0")[2]
    Action(kind='B', micro_batch=0, chunk=0)
    """
    steps: list[Step] = []
    for piece in re.findall(r"\{[^}]*\}|\S+", text):
        if piece.startswith("{") and piece.endswith("}"):
            steps.append(Batch(tuple(Action.parse(word) for word in piece[1:-1].split())))
        else:
            steps.append(Action.parse(piece))
    return tuple(steps)


def spell_steps(steps: Iterable[Step]) -> str:
    """Steps on one line; `parse_steps` reads it back."""
    return " ".join(map(str, steps))
