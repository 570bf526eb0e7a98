"""Strategies that take turns in one run: each step has that for which its documents were shared (paper §7, §8)."""

from dataclasses import dataclass

from hetero_megatron.journal import Journal
from hetero_megatron.runtime.checkpoint import Saver
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.switcher import Switcher


@dataclass
class Turns:
    """Who changes the strategy, and who goes on with the other session.

    Attributes:
        evaluates: the name of the strategy that evaluation takes.
    """

    switcher: Switcher
    saver: Saver
    journal: Journal
    evaluates: str

    def take(self, number: int) -> Session:
        """Collective over all ranks, between two steps: the session of strategy `number`, which trains from now on."""
        return self._to(list(self.switcher.programs)[number])

    def evaluate(self) -> Session:
        """Collective over all ranks: the session for held-out documents; training goes back by itself."""
        return self._to(self.evaluates)

    def _to(self, name: str) -> Session:
        before = self.switcher.active
        report = self.switcher.switch(name) if name != before else None
        session = self.switcher.session
        assert session is not None, "strategies that share states have the same ranks"
        self.saver.session = self.journal.session = session
        if report is not None:
            self.journal.switched(before, name, report)
        return session
