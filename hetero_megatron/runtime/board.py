"""What every rank of a node is doing, on a page of memory that it shares with its supervisor.

A rank writes its pulse and its place in the step there, at no cost; the supervisor can read both when the rank has
ended or does not answer.
"""

import mmap
import struct
import threading
import time
from dataclasses import dataclass
from typing import Literal, get_args

StepPhase = Literal[
    "between two steps",
    "forward",
    "backward",
    "gradient sync",
    "agreement",
    "committed",
    "update",
    "parameter gather",
    "evaluation",
    "saving",
    "connecting",
    "switching",
    "leaving",
]
"""Where a rank that takes part in the steps can be."""
PHASES = ("starting", *get_args(StepPhase), "recovery", "waiting for work")
"""Where in its work a rank can be."""

_WORDS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "agreement": "in the agreement",
    "committed": "behind the commit point",
    "update": "in the update",
}
_WITHOUT_STEP = ("starting", "leaving", "waiting for work")

_ENTRY = struct.Struct("ddiq")
_SIZE = 64
_BEAT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Note:
    """Of one rank: its last sign of life and since when it is where it is (`time.monotonic`), and where."""

    beat: float
    since: float
    phase: str
    iteration: int

    def __str__(self) -> str:
        """`in the backward pass of iteration 4`, as far as it applies."""
        if self.phase in _WITHOUT_STEP:
            return f"while {self.phase}"
        if self.phase == "between two steps":
            return f"before iteration {self.iteration}"
        return f"{_WORDS.get(self.phase, f'in {self.phase}')} of iteration {self.iteration}"


class Board:
    """The shared page of `count` ranks; made before they are forked."""

    def __init__(self, count: int) -> None:
        self._pages = mmap.mmap(-1, max(1, count) * _SIZE)
        for place in range(count):
            self.clear(place)

    def clear(self, place: int) -> None:
        """A rank that has not said anything yet."""
        now = time.monotonic()
        self._write(place, _ENTRY.pack(now, now, 0, 0))

    def _write(self, place: int, content: bytes) -> None:
        # Not `pack_into`, which clears the place first: whoever reads meanwhile would see a rank dead since the boot.
        self._pages[place * _SIZE : place * _SIZE + len(content)] = content

    def read(self, place: int) -> Note:
        """What is known of the rank at `place`."""
        beat, since, phase, iteration = _ENTRY.unpack_from(self._pages, place * _SIZE)
        return Note(beat, since, PHASES[phase], iteration)

    def note(self, place: int, phase: str, iteration: int) -> None:
        """The rank at `place` says where it is."""
        now = time.monotonic()
        self._write(place, _ENTRY.pack(now, now, PHASES.index(phase), iteration))

    def start_pulse(self, place: int) -> None:
        """Show a sign of life from now on, by a thread: a stopped process shows none."""

        def beat() -> None:
            while True:
                self._write(place, struct.pack("d", time.monotonic()))
                time.sleep(_BEAT_SECONDS)

        threading.Thread(target=beat, name="pulse", daemon=True).start()
