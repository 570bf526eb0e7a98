"""Where a step's time goes on this rank."""

import time

from hetero_megatron.runtime.recorder import Moment, Recorder

KINDS = ("compute", "communication", "bubble")


class Clock:
    """Seconds by kind since `reset`: computing, communicating, and waiting for another stage (bubble).

    Measured on the host; on an accelerator it is the time to launch, not to run.

    Attributes:
        passes: seconds of forward and backward passes, collectives inside them included.
        recorder: what makes spans of this step for a trace; None where nobody asked.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.passes = 0.0
        self.recorder: Recorder | None = None

    def reset(self) -> None:
        """Start a new step."""
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.passes = 0.0

    def add(self, kind: str, since: float) -> float:
        """Book the time from `since` (`time.perf_counter`) until now; returns now."""
        now = time.perf_counter()
        self.seconds[kind] += now - since
        return now

    def mark(self) -> Moment | None:
        """Where a span begins, for `span`; None where nothing is recorded."""
        return None if self.recorder is None else self.recorder.moment()

    def span(self, category: str, name: str, since: Moment | None) -> None:
        """What began at `since` is done; nothing where that is None."""
        if since is not None and self.recorder is not None:
            self.recorder.add(category, name, since)
