"""A Session that outlives its peers: on a loss, the survivors go on in the same processes under another strategy.

A step is all or nothing. What every rank has reached when a connection fails is told to the coordinator; the step
that any survivor knows to count is finished by all, from gradients that they hold, and any other is made again. The
state then moves from its living owners into the layout of the next Program, and the old one is given back once every
rank has the new one.
"""

import gc
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist

from hetero_megatron.errors import ReshardError, RuntimeFailure
from hetero_megatron.program import Program
from hetero_megatron.runtime.faults import Faults
from hetero_megatron.runtime.heir import Heir
from hetero_megatron.runtime.launch import is_peer_failure
from hetero_megatron.runtime.making import Making
from hetero_megatron.runtime.meeting import cut_when_halted, meet
from hetero_megatron.runtime.membership import Halted, Member, Progress, View
from hetero_megatron.runtime.recovery import ASKED, Laps, Recovery, in_short
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.sockets import Sockets, cut
from hetero_megatron.runtime.strategy_text import as_text, from_text
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.strategy import Strategy

T = TypeVar("T")
Asked = Callable[[View], Strategy | None]
"""The strategy that somebody asked for before this view was made, for just its ranks."""
Restart = Callable[[Program, World, Groups], Session | None]
"""A session from the last checkpoint, where a part of the state is lost; None on a rank without a part in it."""


class Replan(Protocol):
    """What a run goes on with when other ranks are there than before."""

    def strategy(self, base: Program, ranks: tuple[int, ...]) -> tuple[Strategy, str]:
        """The strategy for `ranks` in place of `base`, in whose layout the state is; and what there is to say of it.

        Asked of one rank, which tells the others: planning on all of them at once would take longer.
        """

    def program(self, strategy: Strategy, ranks: tuple[int, ...]) -> Program:
        """The program of that strategy, on every rank."""


class ElasticSession:
    """Owns the Session of the current generation.

    Attributes:
        session: None on a rank without a part in the strategy.
        completed: the result of a step that this rank finished after its peers were lost.
        recoveries: one per generation after the first.
        came_late: whether this rank was to be taken in, and training was over before.
    """

    def __init__(
        self,
        member: Member,
        program: Program,
        making: Making,
        start: Restart,
        replan: Replan,
        restart: Restart | None = None,
        faults: Faults | None = None,
        asked: Asked | None = None,
    ) -> None:
        """Collective over the first view's ranks. `start` makes the first session, `restart` one from a checkpoint.

        `asked` gives the strategy that was asked for in place of what `replan` makes, if one was.
        """
        self._asked = asked or _nothing_asked
        self.member, self._making, self._replan, self._restart = member, making, replan, restart
        self._start, self._faults = start, faults
        self._programs: dict[int, Program] = {}
        self._sockets: Sockets = frozenset()
        self._held = []
        self._base = 0
        self.session: Session | None = None
        self.completed: StepResult | None = None
        self.recoveries: list[Recovery] = []
        self.world: World
        self._failed = ""
        self._noticed_at = 0.0
        view = member.enter()
        self.came_late = view is None
        if view is None:
            return
        try:
            if view.generation:
                self._adopt(view, "")
            else:
                self._programs[0] = program
                if member.rank == view.ranks[0]:
                    member.share("strategy", as_text(program.strategy, ""))
                with cut_when_halted(member):
                    groups = self._connect(program, view)
                    session = start(program, self.world, groups)
                    if session is not None:
                        making.guard(session)
                self._take(session, 0)
        except RuntimeError as error:
            self._note_failure(error)

    def run(self, body: Callable[[Session], T]) -> T | None:
        """Call `body(session)` until it returns; whenever peers are lost in it, recover and call it anew.

        `body` looks at `session.iteration` to see how far the run is. None on a rank that had no part in the end.
        """
        while not self.came_late:
            if not self._failed:
                try:
                    result = body(self.session) if self.session is not None else None
                    if self.session is not None:
                        if self._end():
                            return result
                    elif not self.member.wait_for_work():
                        return None
                    self._failed = "another rank has stopped"
                    self._noticed_at = time.time()
                except RuntimeError as error:
                    self._note_failure(error)
            # Outside of the handler: a traceback would keep connections open.
            self._recover()
        return None

    @property
    def program(self) -> Program:
        """The program of the current generation."""
        return self._programs[self.member.view.generation]

    def stop_for_joining(self) -> None:
        """To be called between two steps by all ranks of the strategy, which have agreed to take others in."""
        raise _Joining

    def _note_failure(self, error: RuntimeError) -> None:
        if not is_peer_failure(error) and not isinstance(error, (_Joining, Halted)):
            raise error
        self._noticed_at = time.time()
        if isinstance(error, _Joining):
            self._failed = _JOINING
            return
        self._failed = f"rank {self.member.rank} ({in_short(error)})"

    def _recover(self) -> None:
        while self._failed:
            noticed, at = self._failed, self._noticed_at
            noticed = "" if noticed == _JOINING else noticed
            self._failed = ""
            progress = self._let_go(noticed, at)
            view = self.member.stop(progress)
            try:
                self._adopt(view, noticed)
            except RuntimeError as error:
                self._note_failure(error)

    def _let_go(self, noticed: str, at: float) -> Progress:
        """Close all connections, so that peers notice, too; what this rank has reached."""
        session, self.session = self.session, None
        self.member.note("recovery", session.iteration if session else 0)
        cut(self._sockets)
        self._sockets = frozenset()
        held, self._held = self._held, []
        self._old = session or self._old
        if self._next is not None and hasattr(self._next[1], "world"):
            self._next[1].let_go()
        if session is not None:
            if session.agreed is not None and session.agreed[0] > session.iteration:
                self.completed = session.complete(session.agreed[1])
            session.let_go()
        if dist.is_initialized():
            dist.destroy_process_group()
        if hasattr(self, "world"):
            del self.world
        gc.collect()
        # In a thread: gloo may wait for a send on a connection that was cut, and its group for that, until the time-out.
        threading.Thread(target=held.clear, name="old groups", daemon=True).start()
        old = self._old
        if old is None:
            return Progress(-1, noticed=noticed, at=(at, time.time()))
        agreed = old.agreed[1] if old.agreed and old.agreed[0] == old.iteration else None
        counters = old.iteration, agreed, self._base, old.skipped_iterations, old.state.step
        return Progress(*counters, noticed, (at, time.time()))

    _held: list[dist.ProcessGroup]
    """The groups of this generation, so that none of them is given back before `_let_go` does."""
    _old: Session | None = None
    """The session whose state is complete, from which a recovery moves; kept until all have the next one."""
    _next: tuple[int, Session] | None = None
    """The session that a recovery was filling, by generation: complete if any rank knows that all have theirs."""

    def _connect(self, program: Program, view: View) -> Groups:
        making = self._making
        device, timeout_s, local = making.device, making.timeout_s, making.local

        def stage() -> None:
            self._note("connecting", view.iteration)

        met = meet(self.member, view, program, device, timeout_s, local, stage)
        self.world, self._sockets, self._held = met.world, met.sockets, met.groups.held
        return met.groups

    def _take(self, session: Session | None, generation: int) -> None:
        """Go on with this session."""
        self._old, self._next, self.session, self._base = None, None, session, generation
        if session is None:
            self.member.note("waiting for work", 0)
            return
        session.phase_hook = self._note
        self._note("between two steps", session.iteration + 1)

    def _note(self, phase: str, iteration: int) -> None:
        self.member.note(phase, iteration)
        if phase == "committed" and self._redoing is not None:
            self._redoing.lap("redo")
            self._redoing = None
        self.strike(phase, iteration)

    def strike(self, phase: str, iteration: int) -> None:
        """Let the run's faults strike at a phase, if it has any."""
        if self._faults is not None:
            self._faults.strike(self.member.rank, phase, iteration, self._sockets)
            if self.session is not None:
                self.session.stage.slowness = self._faults.slowness

    _redoing: Laps | None = None
    """The clock of the last recovery, until a step has been committed after it."""

    def _adopt(self, view: View, noticed: str) -> None:
        """Take up the work that a view gives this rank."""
        first, stopped, _ = view.at
        laps = Laps({"detect": max(0.0, stopped - first), "agree": max(0.0, time.time() - stopped)})
        if self._next is not None and self._next[0] == view.base:
            self._old, self._base = self._next[1], view.base
        old, completed, self._next = self._old, False, None
        if old is not None and old.iteration < view.iteration and view.agreed is not None:
            self.completed = old.complete(view.agreed)
            completed = True
        laps.lap("complete")
        base, program, planned = self._program(view)
        laps.lap("plan")
        # Not every rank has something under way with one that is lost now.
        with cut_when_halted(self.member):
            groups = self._connect(program, view)
            laps.lap("groups")
            session, lost_state, moved_bytes = self._filled(base, program, view, groups, laps)
            if session is not None:
                self._making.guard(session)
                self._next = view.generation, session
            # Whoever gets past this knows that all have the new state.
            dist.barrier(group=self.world.control)
        laps.lap("move")
        hook = old.gradient_hook if old is not None else None
        if session is not None and hook is not None:
            session.gradient_hook = hook
        if lost_state:
            self.completed = None
        self._take(session, view.generation)
        iteration = view.iteration if session is None else session.iteration
        seconds, self._redoing = laps.seconds, laps
        self.recoveries.append(
            Recovery(view, noticed, iteration, seconds, planned, lost_state, completed, moved_bytes)
        )
        gc.collect()

    def _filled(
        self, base: Program, program: Program, view: View, groups: Groups, laps: Laps
    ) -> tuple[Session | None, str, int]:
        """This rank's session of the next program with the state in it, what came from a checkpoint, and bytes moved."""
        heir = Heir(self._making, self.member.rank, view, self.world, groups, self._note)
        try:
            plan, acting = heir.plan(base, program)
        except ReshardError as error:
            if self._restart is None:
                raise RuntimeFailure(f"{error}; this run has no checkpoint to go back to") from error
            return self._restart(program, self.world, groups), str(error), 0
        session = heir.session(program)
        laps.lap("specialize")
        return session, "", heir.move(plan, acting, self._old, session)

    def _program(self, view: View) -> tuple[Program, Program, str]:
        """The program that the state is in, the next one, and what there is to say of that."""
        if view.base not in self._programs:
            self._programs[view.base], _ = self._shared(view.base, None)
        base, told = self._programs[view.base], None
        if self.member.rank == min(set(view.ranks) - set(view.joined), default=-1):
            asked = self._asked(view)
            told = as_text(asked, ASKED) if asked else as_text(*self._replan.strategy(base, view.ranks))
        program, planned = self._shared(view.generation, told)
        self._programs[view.generation] = program
        return base, program, planned

    def _shared(self, generation: int, told: str | None) -> tuple[Program, str]:
        """The program of a generation, from the strategy that one of its ranks has told; and what it said of it."""
        strategy, planned = from_text(self.member.share("strategy", told, generation))
        ranks = self.member.view_of(generation).ranks
        return self._replan.program(strategy, ranks), planned

    def _end(self) -> bool:
        """Whether all ranks have ended their work; if one was lost before, the others go on."""
        session = self.session
        if session is None:
            return True
        self._note("leaving", session.iteration)
        return self.member.end(session.world.ranks)

    def leave(self) -> None:
        """Close all connections at the end."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _nothing_asked(view: View) -> None:
    del view


_JOINING = "ranks asked to join"


class _Joining(RuntimeError):
    """Ranks stop between two steps to take others in."""
