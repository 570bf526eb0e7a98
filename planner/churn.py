"""A run through losses and joins, replayed without a cluster: which of its seconds were of use (paper Figure 16).

A step is all or nothing, and no sample is left out: what a run falls back behind its last checkpoint, it makes again.
Every second is counted once: as useful, as lost work, as a pause, as the stall of a save, or as waiting for devices.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Protocol

from hetero_megatron.strategy import Strategy

Ranks = frozenset[int]


@dataclass(frozen=True, slots=True)
class Change:
    """Ranks that are gone and ranks that are there from second `at` on."""

    at: float
    lost: Ranks = frozenset()
    joined: Ranks = frozenset()


@dataclass(frozen=True, slots=True)
class Work:
    """A strategy and what a step of it takes."""

    strategy: Strategy
    step_seconds: float

    @property
    def ranks(self) -> Ranks:
        """Who takes part; the idle ones do not."""
        return frozenset(self.strategy.ranks)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system does about a change.

    Attributes:
        work: what it goes on with; None where nothing fits, which waits for devices.
        pause_seconds: until the next step begins.
        from_checkpoint: processes start from the newest complete checkpoint; what came after it is made again.
        write_seconds: of the pause, what a checkpoint takes that is written before, at its beginning.
    """

    work: Work | None
    pause_seconds: float = 0.0
    from_checkpoint: bool = False
    write_seconds: float = 0.0


class Policy(Protocol):
    """A system under churn. Pure: the same arguments give the same answer."""

    def concerned(self, work: Work, lost: Ranks) -> bool:
        """Whether the loss of these ranks disturbs this work."""

    def begin(self, present: Ranks) -> Answer:
        """Start from a checkpoint, or from nothing."""

    def lose(self, present: Ranks, work: Work) -> Answer:
        """Some ranks of `work`, in whose layout the state is, are present no more."""

    def join(self, present: Ranks, work: Work) -> Answer | None:
        """More ranks are present than before; None to go on without them."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints: seconds between two of them, how long one holds training up, and until it is complete behind it."""

    interval: float = inf
    stall: float = 0.0
    write: float = 0.0


def daly_interval(stall: float, write: float, mean_between_losses: float) -> float:
    """The best time between checkpoints (Young 1974, Daly 2006), not less than writing one takes.

    >>> round(daly_interval(2.0, 0.0, 3600.0), 1)
    118.7
    """
    ratio = stall / (2 * mean_between_losses)
    best = sqrt(2 * stall * mean_between_losses) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall
    return max(best if ratio < 1 else mean_between_losses, write, 1e-9)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a run's seconds went.

    Attributes:
        steps: that count at the end.
        useful, lost, paused, saving, waiting: seconds; together all there were. `lost` is work that was cut off or had to
            be made again.
        recoveries, restarts, joins: how often the state stayed with the survivors, came from a checkpoint, or ranks
            were taken in.
        curve: (second, steps that count), at every change and every fall back.
    """

    steps: int
    useful: float
    lost: float
    paused: float
    saving: float
    waiting: float
    recoveries: int
    restarts: int
    joins: int
    curve: tuple[tuple[float, int], ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.useful + self.lost + self.paused + self.saving + self.waiting


def replay(changes: Iterable[Change], end: float, policy: Policy, saving: Saving | None = None) -> Outcome:
    """A run from second 0, when nobody is there yet, to second `end`; changes in ascending order."""
    run = _Run(policy, saving or Saving())
    for change in changes:
        if change.at < end:
            run.advance(change.at)
            run.change(change)
    run.advance(end)
    return run.outcome()


@dataclass(frozen=True, slots=True)
class _Saved:
    complete_at: float
    steps: int
    useful: float


class _Run:
    """The state of a replay.

    Training goes on when the pause is over; until then the state is in the layout of `_home`, or on disk only (None).
    """

    def __init__(self, policy: Policy, saving: Saving) -> None:
        self._policy, self._saving = policy, saving
        self._now, self._pause, self._into = 0.0, 0.0, 0.0
        self._present: Ranks = frozenset()
        self._home: Work | None = None
        self._work: Work | None = None
        self._newcomers = self._stalls = self._begun = False
        self._steps, self._saved_at = 0, 0.0
        self._saves = [_Saved(0.0, 0, 0.0)]
        self._useful = self._lost = self._paused = self._stalled = self._waiting = 0.0
        self._recoveries = self._restarts = self._joins = 0
        self._curve: list[tuple[float, int]] = [(0.0, 0)]

    def change(self, change: Change) -> None:
        """Ranks go, and others come."""
        self._present = (self._present - change.lost) | change.joined
        self._newcomers = self._newcomers or bool(change.joined)
        work, home = self._work, self._home
        if work is not None and any(
            self._policy.concerned(each, change.lost) for each in (work, home) if each is not None
        ):
            self._fail(home)
        elif work is None:
            self._start()
        self._mark()

    def _fail(self, home: Work | None) -> None:
        self._lost += self._into
        self._into = 0.0
        if home is None:
            # Still being started: once more.
            self._fall_back()
            self._start()
            return
        answer = self._policy.lose(self._present, home)
        if answer.from_checkpoint or answer.work is None:
            self._fall_back()
            self._restarts += answer.work is not None
        else:
            self._recoveries += 1
        self._go_on(answer)

    def _start(self) -> None:
        answer = self._policy.begin(self._present)
        self._restarts += self._begun and answer.work is not None
        self._begun = self._begun or answer.work is not None
        self._go_on(answer)

    def _go_on(self, answer: Answer) -> None:
        self._work = answer.work
        self._pause, self._stalls = answer.pause_seconds, False
        if answer.from_checkpoint or answer.work is None:
            self._home = None
        if answer.work is not None:
            self._newcomers = False

    def _fall_back(self) -> None:
        """To the newest checkpoint that is complete."""
        complete = bisect_right(self._saves, self._now, key=lambda saved: saved.complete_at)
        del self._saves[complete:]
        saved = self._saves[-1]
        self._mark()
        self._lost += self._useful - saved.useful
        self._useful, self._steps = saved.useful, saved.steps
        self._mark()

    def advance(self, until: float) -> None:
        """Train, or pause, until then."""
        while self._now < until:
            if self._work is None:
                self._waiting += until - self._now
                self._now = until
            elif self._pause > 0:
                self._sit_out(until)
            elif self._into == 0 and self._newcomers:
                self._take_in()
            elif self._into == 0 and self._is_due():
                self._save()
            else:
                self._train(self._work, until)

    def _sit_out(self, until: float) -> None:
        seconds = min(self._pause, until - self._now)
        if self._stalls:
            self._stalled += seconds
        else:
            self._paused += seconds
        # Where the pause ends before `until`, it ends exactly.
        over = self._pause <= until - self._now
        self._now = self._now + self._pause if over else until
        self._pause = 0.0 if over else self._pause - seconds
        if over:
            self._home = self._work

    def _train(self, work: Work, until: float) -> None:
        self._home = work
        left = work.step_seconds - self._into
        if self._now + left > until:
            self._into += until - self._now
            self._now = until
            return
        self._now += left
        self._into = 0.0
        self._steps += 1
        self._useful += work.step_seconds

    def _is_due(self) -> bool:
        behind = self._steps > self._saves[-1].steps
        return behind and self._now - self._saved_at >= self._saving.interval

    def _save(self) -> None:
        self._saved_at = self._now
        complete = self._now + self._saving.stall + self._saving.write
        self._saves.append(_Saved(complete, self._steps, self._useful))
        self._pause, self._stalls = self._saving.stall, True

    def _take_in(self) -> None:
        self._newcomers = False
        assert self._work is not None, "ranks are taken in between two steps of some work"
        answer = self._policy.join(self._present, self._work)
        if answer is None:
            return
        self._joins += 1
        if answer.write_seconds:
            self._saved_at = self._now + answer.write_seconds
            # What is being written already would be complete later than this one.
            while self._saves[-1].complete_at > self._now:
                self._saves.pop()
            self._saves.append(_Saved(self._saved_at, self._steps, self._useful))
        self._go_on(answer)

    def _mark(self) -> None:
        self._curve.append((self._now, self._steps))

    def outcome(self) -> Outcome:
        """What came of it."""
        self._mark()
        return Outcome(
            self._steps,
            self._useful,
            self._lost + self._into,
            self._paused,
            self._stalled,
            self._waiting,
            self._recoveries,
            self._restarts,
            self._joins,
            tuple(self._curve),
        )
