"""Weight gradients that fill the time in which a rank waits for its tensor-parallel peers.

The gradient of a layer's input is needed at once, that of its weight only at the end of the backward pass
(Megatron overlaps one such product with one all-reduce; here whatever is waiting is taken).
"""

import time
from collections import deque
from collections.abc import Callable

import torch


class Deferred:
    """Tasks in the order in which they came."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], object]] = deque()

    def add(self, task: Callable[[], object]) -> None:
        """Run `task` later, at the end of the backward pass at the latest."""
        self._tasks.append(task)

    def run(self) -> float:
        """Run all tasks that are waiting; the seconds that they took."""
        if not self._tasks:
            return 0.0
        at = time.perf_counter()
        with torch.no_grad():
            while self._tasks:
                self._tasks.popleft()()
        return time.perf_counter() - at
