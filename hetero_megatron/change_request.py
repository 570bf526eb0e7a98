"""Another strategy, asked for by the leader of an elastic run and taken by all ranks at the next step boundary.

It is left in the store before the vote that makes the ranks stop. The rank that then says what to go on with finds it there.
"""

import base64
import pickle
from collections.abc import Callable

import torch.distributed as dist

from hetero_megatron.next_program import NextProgram, is_for
from hetero_megatron.program import Program
from hetero_megatron.stragglers import Watch
from hetero_megatron.strategy import Strategy

_KEY = "asked"


class ChangeRequests:
    """What a run goes on with: the strategy that was asked for last, for just its ranks, else what would follow anyway."""

    def __init__(self, store: dist.Store, following: NextProgram) -> None:
        self._store, self._following = store, following

    def attend(self, watch: Watch, awaited: Callable[[], bool]) -> Callable[[], bool]:
        """Take what a watch asks for; returns whether the ranks have to stop, for that or because of `awaited`."""
        watch.ask = self._ask
        return lambda: watch.wants_change or awaited()

    def _ask(self, strategy: Strategy) -> None:
        self._store.set(_KEY, base64.b64encode(pickle.dumps(strategy)).decode())

    def strategy(self, base: Program, ranks: tuple[int, ...]) -> tuple[Strategy, str]:
        """The strategy for `ranks`, and what there is to say of it."""
        if self._store.check([_KEY]):
            asked: Strategy = pickle.loads(base64.b64decode(self._store.get(_KEY)))
            if is_for(asked, ranks):
                return asked, "the strategy for the measured rates"
        return self._following.strategy(base, ranks)

    def program(self, strategy: Strategy, ranks: tuple[int, ...]) -> Program:
        """The program of that strategy."""
        return self._following.program(strategy, ranks)
