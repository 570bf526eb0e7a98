"""Being asked to stop: SIGTERM or SIGINT ends a run after its step, with everything saved.

A scheduler signals a whole process group, one process, or the launcher only, once or several times. Whoever is
asked remembers it; the ranks agree on the step after which they stop by a vote in the step itself.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    The first SIGTERM or SIGINT, and every further SIGTERM, asks; a second SIGINT interrupts at once. A forked
    process inherits what its parent listens to and remembers for itself.
    """

    def __init__(self) -> None:
        self.signal = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGTERM and SIGINT in this process and in those that it forks; nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self._asked) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal == name == "SIGINT":
            raise KeyboardInterrupt
        self.signal = self.signal or name
