"""A Session that outlives its peers: on a loss, the survivors go on in the same processes under another strategy.

A step is all or nothing. What every rank has reached when a connection fails is told to the coordinator; the step
that any survivor knows to count is finished by all, from gradients that they hold, and any other is made again. The
state then moves from its living owners into the layout of the next Program, and the old one is given back once every
rank has the new one.
"""

import gc
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import ReshardError, RuntimeFailure
from hetero_megatron.losses import guardians, stand_ins
from hetero_megatron.program import Program
from hetero_megatron.runtime.binding import Kernels
from hetero_megatron.runtime.copies import Copies
from hetero_megatron.runtime.faults import Faults
from hetero_megatron.runtime.launch import is_peer_failure
from hetero_megatron.runtime.membership import Member, Progress, View
from hetero_megatron.runtime.move import Moves
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.sockets import Sockets, cut, open_sockets
from hetero_megatron.runtime.state import BUCKET_ELEMENTS
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.switch_plan import switch_between

T = TypeVar("T")
Replan = Callable[[Program, tuple[int, ...]], Program]
"""From the program whose layout the state is in, and the ranks that are there now, to the next program.

A pure function: every rank calls it with the same arguments and goes on with its own result.
"""
Restart = Callable[[Program, World, Groups], Session | None]
"""A session from the last checkpoint, where a part of the state is lost; None on a rank without a part in it."""


@dataclass(frozen=True)
class Making:
    """What sessions are made of besides their program and world; `modules` makes the model's leaves anew."""

    modules: Callable[[], Mapping[str, nn.Module]]
    settings: OptimizerSettings
    dtype: torch.dtype = torch.float32
    kernels: Kernels | None = None
    bucket_elements: int = BUCKET_ELEMENTS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 600.0
    local: bool = True
    copies: bool = False

    def kept(self, program: Program) -> dict[int, int]:
        """Guardians by ward, where this run keeps copies."""
        return guardians(program) if self.copies else {}

    def guard(self, session: Session) -> None:
        """Collective over the session's ranks: copies of what a rank alone holds."""
        if kept := self.kept(session.program):
            session.copies = Copies(
                session.program,
                session.world,
                session.state,
                kept,
                self.settings,
                session.adam,
                self.bucket_elements,
            )
            session.copies.fill()

    def session(self, program: Program, world: World, groups: Groups) -> Session:
        """A session without memory."""
        return Session(
            program,
            world,
            self.modules(),
            None,
            self.settings,
            self.dtype,
            self.kernels,
            self.bucket_elements,
            groups,
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery was about and took.

    Attributes:
        iteration: the last step that counts.
        seconds: by phase: detect, agree, plan, groups, specialize, move.
        lost_state: what no survivor holds, when the run had to go back to a checkpoint.
        completed: whether this rank made the last update afterwards.
        moved_bytes: of master weights and moments, sent by all ranks together.
    """

    view: View
    noticed: str
    iteration: int
    seconds: Mapping[str, float]
    lost_state: str = ""
    completed: bool = False
    moved_bytes: int = 0

    def __str__(self) -> str:
        """The line for the log."""
        lost = "; ".join(self.view.lost[rank] for rank in sorted(self.view.lost))
        if not lost:
            lost = (
                f"rank {ranges_text(self.view.joined)} asked to join"
                if self.view.joined
                else "connections were lost"
            )
        parts = ", ".join(f"{phase} {took:.3f}" for phase, took in self.seconds.items())
        joined = f" ({ranges_text(self.view.joined)} new)" if self.view.joined else ""
        noticed = f"; noticed by {self.noticed}" if self.noticed else ""
        back = f"; {self.lost_state}: back to the last checkpoint" if self.lost_state else ""
        return (
            f"{lost}{noticed}{back}; going on with ranks {ranges_text(self.view.ranks)}{joined} after "
            f"iteration {self.iteration}, in {sum(self.seconds.values()):.3f} s ({parts}), "
            f"{self.moved_bytes / 1e6:,.2f} MB moved"
        )


class ElasticSession:
    """Owns the Session of the current generation.

    Attributes:
        session: None on a rank without a part in the strategy.
        completed: the result of a step that this rank finished after its peers were lost.
        recoveries: one per generation after the first.
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
    ) -> None:
        """Collective over the first view's ranks. `start` makes the first session, `restart` one from a checkpoint."""
        self.member, self._making, self._replan, self._restart = member, making, replan, restart
        self._start, self._faults = start, faults
        self._programs: dict[int, Program] = {0: program}
        self._sockets: Sockets = frozenset()
        self._base = 0
        self.session: Session | None = None
        self.completed: StepResult | None = None
        self.recoveries: list[Recovery] = []
        self.world: World
        self._failed = ""
        self._noticed_at = 0.0
        view = member.enter()
        try:
            if view.generation:
                self._programs[0] = replan(program, member.view_of(0).ranks)
                self._adopt(view, time.time(), "")
            else:
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
        while True:
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

    @property
    def program(self) -> Program:
        """The program of the current generation."""
        return self._programs[self.member.view.generation]

    def stop_for_joining(self) -> None:
        """To be called between two steps by all ranks of the strategy, which have agreed to take others in."""
        raise _Joining

    def _note_failure(self, error: RuntimeError) -> None:
        if not is_peer_failure(error) and not isinstance(error, _Joining):
            raise error
        self._noticed_at = time.time()
        if isinstance(error, _Joining):
            self._failed = _JOINING
            return
        self._failed = f"rank {self.member.rank} ({_in_short(error)})"

    def _recover(self) -> None:
        while self._failed:
            noticed, at = self._failed, self._noticed_at
            noticed = "" if noticed == _JOINING else noticed
            self._failed = ""
            progress = self._let_go(noticed, at)
            view = self.member.stop(progress)
            try:
                self._adopt(view, at, noticed)
            except RuntimeError as error:
                self._note_failure(error)

    def _let_go(self, noticed: str, at: float) -> Progress:
        """Close all connections, so that peers notice, too; what this rank has reached."""
        session, self.session = self.session, None
        self.member.note("recovery", session.iteration if session else 0)
        cut(self._sockets)
        self._sockets = frozenset()
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
        old = self._old
        if old is None:
            return Progress(-1, noticed=noticed, at=(at, time.time()))
        agreed = old.agreed[1] if old.agreed and old.agreed[0] == old.iteration else None
        counters = old.iteration, agreed, self._base, old.skipped_iterations, old.state.step
        return Progress(*counters, noticed, (at, time.time()))

    _old: Session | None = None
    """The session whose state is complete, from which a recovery moves; kept until all have the next one."""
    _next: tuple[int, Session] | None = None
    """The session that a recovery was filling, by generation: complete if any rank knows that all have theirs."""

    def _connect(self, program: Program, view: View) -> Groups:
        making = self._making
        before = open_sockets()
        store = dist.PrefixStore(f"world/{view.generation}", self.member.store)
        rank, ranks = self.member.rank, view.ranks
        self.world = World.over(store, rank, ranks, making.device, making.timeout_s, making.local)
        groups = Groups.of(self.world, [program])
        self._sockets = open_sockets() - before
        return groups

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
        if self._faults is not None:
            self._faults.strike(self.member.rank, phase, iteration, self._sockets)

    def _adopt(self, view: View, noticed_at: float, noticed: str) -> None:
        """Take up the work that a view gives this rank."""
        first, stopped, made = view.at
        seconds = {"detect": max(0.0, stopped - first), "agree": max(0.0, time.time() - stopped)}
        del made, noticed_at
        clock = _Clock(seconds)
        if self._next is not None and self._next[0] == view.base:
            self._old, self._base = self._next[1], view.base
        old, completed, self._next = self._old, False, None
        if old is not None and old.iteration < view.iteration and view.agreed is not None:
            self.completed = old.complete(view.agreed)
            completed = True
        clock.lap("complete")
        base, program = self._program(view)
        clock.lap("plan")
        groups = self._connect(program, view)
        clock.lap("groups")
        making, lost_state, moved_bytes = self._making, "", 0
        has_part = self.member.rank in program.strategy.ranks
        session: Session | None = None
        try:
            gone = frozenset(base.strategy.ranks) - (set(view.ranks) - set(view.joined))
            acting = stand_ins(base, gone, making.kept(base))
            adam = making.settings.name == "adam"
            plan = switch_between(base, program, lost=gone - set(acting), moments=adam)
            session = making.session(program, self.world, groups) if has_part else None
            clock.lap("specialize")
            if session is not None:
                session.phase_hook = self._note
                session.enter("switching", view.iteration)
            before = None if old is None else old.state
            after = None if session is None else session.state
            shadows = old.copies.shadows if old is not None and old.copies is not None else {}
            own = {ward: shadows[ward] for ward, guardian in acting.items() if guardian == self.member.rank}
            moves = Moves(plan, self.world, before, after, acting=acting, shadows=own)
            self._move(moves, view, session)
            moved_bytes = int(sum(sum(by_link.values()) for by_link in moves.bytes_sent.values()))
        except ReshardError as error:
            if self._restart is None:
                raise RuntimeFailure(f"{error}; this run has no checkpoint to go back to") from error
            lost_state = str(error)
            session = self._restart(program, self.world, groups)
        if session is not None:
            making.guard(session)
            self._next = view.generation, session
        # Whoever gets past this knows that all have the new state.
        dist.barrier(group=self.world.control)
        clock.lap("move")
        hook = old.gradient_hook if old is not None else None
        if session is not None and hook is not None:
            session.gradient_hook = hook
        if lost_state:
            self.completed = None
        self._take(session, view.generation)
        iteration = view.iteration if session is None else session.iteration
        self.recoveries.append(
            Recovery(view, noticed, iteration, seconds, lost_state, completed, moved_bytes)
        )
        gc.collect()

    def _move(self, moves: Moves, view: View, session: Session | None) -> None:
        moves.run(keep=True)
        if session is not None:
            session.iteration, session.skipped_iterations = view.iteration, view.skipped
            session.state.step = view.optimizer_steps
            session.gather.start()
            session.gather.finish()

    def _program(self, view: View) -> tuple[Program, Program]:
        """The program that the state is in, and the next one; who joined follows the views it has not seen."""
        for generation in range(1, view.generation + 1):
            if generation not in self._programs:
                passed = view if generation == view.generation else self.member.view_of(generation)
                self._programs[generation] = self._replan(self._programs[passed.base], passed.ranks)
        return self._programs[view.base], self._programs[view.generation]

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


_JOINING = "ranks asked to join"


class _Joining(RuntimeError):
    """Ranks stop between two steps to take others in."""


@dataclass
class _Clock:
    seconds: dict[str, float]
    at: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.at
        self.at = now


def _in_short(error: RuntimeError) -> str:
    """`Connection reset by peer`: without the place in the library, the addresses, and the advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"\[[^\]]*\](:\d+|:)? *", "", text.partition(". This is")[0]).strip()[:120]
