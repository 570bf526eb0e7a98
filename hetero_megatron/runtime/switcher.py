"""Several programs of one model in one run, all made before training; one of them trains at a time (paper §7)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hetero_megatron.comm.relay import relay
from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.program import Program
from hetero_megatron.runtime.bind import Sharing
from hetero_megatron.runtime.binding import Kernels
from hetero_megatron.runtime.move import MESSAGE_BYTES, Moves
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, ParameterSlot
from hetero_megatron.runtime.switch import SwitchReport, change_layout, switch
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.switch_plan import SwitchPlan, switch_between


class Switcher:
    """Owns a Session per program; all but the active one are without memory.

    Attributes:
        active: the name of the program that trains.
        sessions: by name, those of this rank.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        world: World,
        modules: Callable[[], Mapping[str, nn.Module]],
        initial: Callable[[ParameterSlot], Tensor],
        settings: OptimizerSettings,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        active: str | None = None,
        message_bytes: int = MESSAGE_BYTES,
        share_states: bool = False,
    ) -> None:
        """Collective over all processes of `world`, whose ranks are those of all programs together.

        `modules` makes the model's leaves by node name anew: every program binds its own. The other arguments are a
        Session's. The program that trains first is `active`, or the first one.

        With `share_states` the programs, which were built for the same optimizer states, have them in common: a switch
        moves no state and gathers the parameters in the other layout, as does every step of a program whose
        parameters lie otherwise than its states. Right where strategies change often, as for mixed lengths.

        Raises:
            RuntimeFailure: a program has ranks that are no processes of this world, or states are to be shared that
                lie in different places.
        """
        if not programs:
            raise RuntimeFailure("a run needs at least one program")
        for name, program in programs.items():
            if strangers := set(program.strategy.ranks) - set(world.ranks):
                raise RuntimeFailure(
                    f"strategy {name!r} uses rank {min(strangers)}, which is no process of this run; ranks {world.ranks}"
                )
        self.programs, self.world = dict(programs), world
        self.active = active or next(iter(programs))
        self._moments, self._message_bytes, self._shares = (
            settings.name == "adam",
            message_bytes,
            share_states,
        )
        self._moves: dict[tuple[str, str], Moves] = {}
        if share_states:
            check_shared(programs)
        groups = Groups.of(world, list(programs.values()))
        self.sessions: dict[str, Session] = {}
        for name, program in programs.items():
            if world.rank in program.strategy.ranks:
                first = next((each.state for each in self.sessions.values()), None)
                sharing = Sharing(tuple(programs.values()), first) if share_states else None
                self.sessions[name] = Session(
                    program,
                    world,
                    modules(),
                    None,
                    settings,
                    dtype,
                    kernels,
                    bucket_elements,
                    groups,
                    sharing,
                )
        if self.session:
            self.session.start(initial)

    @property
    def session(self) -> Session | None:
        """The active program's session; None where this rank has no part in it."""
        return self.sessions.get(self.active)

    def moves(self, before: str, after: str) -> Moves:
        """What this rank does in a switch, planned and compiled at the first call.

        Raises:
            RuntimeFailure: a name is unknown, or both are the same.
        """
        self._check_names(before, after)
        if (before, after) not in self._moves:
            states = [
                self.sessions[name].state if name in self.sessions else None for name in (before, after)
            ]
            plan = self.plan(before, after)
            self._moves[before, after] = Moves(
                plan,
                self.world,
                states[0],
                states[1],
                self._message_bytes,
                relay(plan.scheme(), plan.cluster, self.world.ranks),
            )
        return self._moves[before, after]

    def _check_names(self, before: str, after: str) -> None:
        for name in (before, after):
            if name not in self.programs:
                raise RuntimeFailure(f"strategy {name!r} is unknown; this run has {', '.join(self.programs)}")
        if before == after:
            raise RuntimeFailure(f"strategy {before!r} is active already: there is nothing to switch")

    def plan(self, before: str, after: str) -> SwitchPlan:
        """What a switch moves, on all ranks."""
        return switch_between(self.programs[before], self.programs[after], moments=self._moments)

    def prepare(self) -> None:
        """Plan and compile all switches between the programs, so that the first of each costs no more than others."""
        for before in self.programs:
            for after in self.programs:
                if before != after and not self._shares:
                    self.moves(before, after)
        if self._shares:
            for session in self.sessions.values():
                _ = session.gather_bytes

    def switch(self, name: str) -> SwitchReport:
        """Collective over all processes, between two steps: go on with the program `name`.

        Raises:
            RuntimeFailure: the program is unknown, or active already; nothing has been sent.
        """
        if self._shares:
            self._check_names(self.active, name)
            report = change_layout(self.world, self.sessions[self.active], self.sessions[name])
        else:
            moves = self.moves(self.active, name)
            report = switch(moves, self.world, self.session, self.sessions.get(name))
        self.active = name
        return report


def check_shared(programs: Mapping[str, Program]) -> None:
    """Refuse programs whose optimizer states do not lie in the same places.

    Raises:
        RuntimeFailure: naming two programs, a parameter, and where its states lie in each.
    """
    first, *others = programs
    wanted = programs[first].annotated.states
    for name in others:
        states = programs[name].annotated.states
        moved = next((each for each in wanted if states[each] != wanted[each]), None)
        if moved is not None:
            raise RuntimeFailure(
                f"strategies {first!r} and {name!r} do not share optimizer states: {moved} is on {wanted[moved]} "
                f"and on {states[moved]}; build one with the states of the other"
            )
