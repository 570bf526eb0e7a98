"""The state of one generation goes over to the session of the next, from whoever of its owners is left (paper §7)."""

from dataclasses import dataclass

from hetero_megatron.losses import stand_ins
from hetero_megatron.program import Program
from hetero_megatron.runtime.making import Making
from hetero_megatron.runtime.membership import View
from hetero_megatron.runtime.move import Moves
from hetero_megatron.runtime.session import PhaseHook, Session
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.switch_plan import SwitchPlan, switch_between


@dataclass(frozen=True)
class Heir:
    """A rank that takes up the work of a view; `note` is told of phases."""

    making: Making
    rank: int
    view: View
    world: World
    groups: Groups
    note: PhaseHook

    def plan(self, base: Program, program: Program) -> tuple[SwitchPlan, dict[int, int]]:
        """What moves from the layout of `base`, and who sends in place of lost ranks, from copies of their states.

        Raises:
            ReshardError: naming the layers that nobody has.
        """
        view, making = self.view, self.making
        gone = frozenset(base.strategy.ranks) - (set(view.ranks) - set(view.joined))
        acting = stand_ins(base, gone, making.kept(base))
        adam = making.settings.name == "adam"
        return switch_between(base, program, lost=gone - set(acting), moments=adam), acting

    def session(self, program: Program) -> Session | None:
        """The session of the next program, without memory; None on a rank that has no part in it."""
        if self.rank not in program.strategy.ranks:
            return None
        session = self.making.session(program, self.world, self.groups)
        session.phase_hook = self.note
        return session

    def move(
        self, plan: SwitchPlan, acting: dict[int, int], old: Session | None, session: Session | None
    ) -> int:
        """Collective over the view: the state, out of `old`, which keeps it as well; bytes that all ranks send."""
        view = self.view
        shadows = old.copies.shadows if old is not None and old.copies is not None else {}
        own = {ward: shadows[ward] for ward, guardian in acting.items() if guardian == self.rank}
        before = None if old is None else old.state
        after = None if session is None else session.state
        moves = Moves(plan, self.world, before, after, acting=acting, shadows=own)
        self.note("switching", view.iteration)
        # Once more when the first round is under way: a fault may strike before it or amid it.
        moves.run(keep=True, amid=lambda: self.note("switching", view.iteration))
        if session is not None:
            session.iteration, session.skipped_iterations = view.iteration, view.skipped
            session.state.step = view.optimizer_steps
            session.gather.start()
            session.gather.finish()
        return int(sum(sum(by_link.values()) for by_link in plan.bytes_sent().values()))
