"""Another strategy, asked for by the leader of an elastic run and taken by all ranks at the next step boundary.

It is told through the store, before the vote that makes the ranks stop: so all of them know it when the next view is made,
and so does whoever joins later.
"""

from collections.abc import Callable

from hetero_megatron.next_program import is_for
from hetero_megatron.runtime.membership import Member, View
from hetero_megatron.runtime.recovery import ASKED
from hetero_megatron.runtime.strategy_text import as_text, from_text
from hetero_megatron.stragglers import Watch
from hetero_megatron.strategy import Strategy


class ChangeRequests:
    """One rank's way to ask, and to learn what was asked for."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def attend(self, watch: Watch) -> Callable[[], bool]:
        """Take what a watch asks for; returns whether the ranks have to stop, for that or for newcomers."""
        watch.ask = self._ask
        return lambda: watch.wants_change or self._member.is_awaited()

    def _ask(self, strategy: Strategy) -> None:
        self._member.store.set(f"asked/{self._member.view.generation + 1}", as_text(strategy, ASKED))

    def strategy(self, view: View) -> Strategy | None:
        """The strategy that was asked for last and is for just the ranks of this view, if any."""
        store = self._member.store
        for generation in range(view.generation, 0, -1):
            if store.check([f"asked/{generation}"]):
                found, _ = from_text(store.get(f"asked/{generation}"))
                if is_for(found, view.ranks):
                    return found
        return None
