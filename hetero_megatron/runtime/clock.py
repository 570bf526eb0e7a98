"""Where a step's time goes on this rank."""

import time

KINDS = ("compute", "communication", "bubble")


class Clock:
    """Seconds by kind since `reset`: computing, communicating, and waiting for another stage (bubble).

    Measured on the host; on an accelerator it is the time to launch, not to run.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def reset(self) -> None:
        """Start a new step."""
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def add(self, kind: str, since: float) -> float:
        """Book the time from `since` (`time.perf_counter`) until now; returns now."""
        now = time.perf_counter()
        self.seconds[kind] += now - since
        return now
