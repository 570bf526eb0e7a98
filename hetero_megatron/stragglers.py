"""Ranks that compute slower than they should, and the plan that expects it (paper A.1).

Every rank's measured rate is held against what the cost model predicts for its stage; the fastest rank counts as 1. When a
plan for devices of the measured speeds gains more than `elastic.straggler_gain` over the running strategy, and wins back
in the steps that are left what the change costs, it is written to the run's folder, and in an elastic run taken.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from hetero_megatron.cluster import Cluster, model_of, ranges_text
from hetero_megatron.pace import Rate, stage_flops
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.movement import movement
from hetero_megatron.planner.plan import make_plan
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.planner.replan import replan
from hetero_megatron.planner.solver import NONE, Solver
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_elastic import ElasticSection
from hetero_megatron.recipe_plan import problem_under
from hetero_megatron.runtime.world import Say
from hetero_megatron.strategy import Strategy
from hetero_megatron.strategy_yaml import strategy_yaml

WARM_UP = 2
"""Steps that are not looked at: of a new session, the first ones allocate and compile."""
WINDOW = 5
"""Steps of which the median counts."""
ALIKE = 0.15
"""Ranks whose speeds differ by less are taken as equally fast."""
PAUSE_SECONDS = 1.0
"""What a change of strategy takes beside moving the states: to stop, agree, and make groups."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A strategy for ranks of the measured speeds.

    Attributes:
        speeds: by rank, 1 for the fastest.
        gain: how much longer a step of the running strategy takes, as a share, both predicted with these speeds.
        step_seconds: predicted for the new one, at the level that was measured.
        switch_seconds: what the change takes about.
    """

    strategy: Strategy
    speeds: Mapping[int, float]
    gain: float
    step_seconds: float
    switch_seconds: float

    @property
    def slow(self) -> dict[int, float]:
        """The ranks that are slower than the fastest."""
        return {rank: speed for rank, speed in self.speeds.items() if speed < 1}

    def __str__(self) -> str:
        """The line for the log."""
        slow = ", ".join(f"rank {rank} computes at {speed:g}" for rank, speed in self.slow.items())
        return (
            f"stragglers: {slow} of the fastest; {spelt(self.strategy)} is predicted to take "
            f"{self.step_seconds:.4g} s a step, {100 * self.gain:.0f}% faster, for a change of "
            f"about {self.switch_seconds:.2g} s"
        )


def spelt(strategy: Strategy) -> str:
    """Who has which layers, pipeline by pipeline: `8 x (rank 0: 0-1 > rank 1: 2-7)`."""
    return " + ".join(
        f"{pipeline.micro_batches} x ("
        + " > ".join(
            f"rank {ranges_text(stage.ranks)}: {ranges_text(stage.layer_numbers)}"
            for stage in pipeline.stages
        )
        + ")"
        for pipeline in strategy.pipelines
    )


class Planner:
    """What measured speeds mean for one recipe's strategies; pure."""

    def __init__(self, recipe: Recipe, profiles: Profiles | None = None) -> None:
        self._recipe = recipe
        self._profiles = profiles_of(recipe) if profiles is None else profiles

    def _costs(self, cluster: Cluster, strategy: Strategy) -> tuple[Problem, Costs]:
        slow = {
            kind.name: _speed(cluster, kind.name)
            for kind in cluster.kinds
            if model_of(kind.name) != kind.name
        }
        return problem_under(self._recipe, strategy, cluster, self._profiles.slowed(slow))

    def speeds(self, program: Program, rates: Mapping[int, Rate]) -> dict[int, float]:
        """Measured over predicted rate of each rank, the largest as 1; ranks that are alike have the same one.

        Ranks of a tensor-parallel group wait for one another, so the whole passes of a stage are as long as its slowest
        rank's; how much faster another rank of it is shows in the seconds that it computes.
        """
        strategy = program.strategy
        _, costs = self._costs(program.cluster, strategy)
        found: dict[int, float] = {}
        for pipeline in strategy.pipelines:
            documents = costs.full(pipeline)
            tokens, pairs = sum(documents), sum(length * length for length in documents)
            for place, stage in enumerate(pipeline.stages):
                own = {rank: rates[rank] for rank in stage.ranks if rank in rates and rates[rank].whole > 0}
                if not own:
                    continue
                chunks = range(len(stage.chunks) or 1)
                seconds = sum(costs.chunk(pipeline, place, n, tokens, pairs).total for n in chunks)
                expected = stage_flops(costs.work, program, stage.ranks[0], tokens, pairs) / seconds
                whole = median(rate.whole for rate in own.values())
                least = min(rate.compute for rate in own.values())
                for rank, rate in own.items():
                    found[rank] = whole / expected * rate.compute / least
        return alike(found)

    def propose(
        self,
        program: Program,
        speeds: Mapping[int, float],
        step_seconds: float,
        steps: int,
        least_gain: float,
    ) -> Proposal | None:
        """A plan that is worth its change within so many steps, each of which takes `step_seconds` now.

        Raises:
            HeteroError: nothing fits, or not this run's steps.
        """
        running = program.strategy
        cluster = program.cluster.slowed(speeds)
        problem, costs = self._costs(cluster, running)
        plan = make_plan(problem, costs, Solver(NONE))
        now = costs.step(running).seconds
        level = step_seconds / now
        horizon = max(1.0, steps * step_seconds)
        # The same work in places that hold it already, where there is such a plan.
        near = replan(plan, running=running, horizon_seconds=horizon)
        moved = movement(running, plan.strategy, cluster, costs).seconds
        found = min(
            ((plan.best, moved), (near.best, near.switch_seconds)),
            key=lambda each: steps * each[0].seconds * level + each[1],
        )
        best, pause = found[0].seconds, PAUSE_SECONDS + found[1]
        gain = now / best - 1
        if gain <= least_gain or steps * (now - best) * level <= pause:
            return None
        kept = replace(
            found[0].strategy,
            offload_optimizer=running.offload_optimizer,
            sequence_parallel=running.sequence_parallel,
            context_parallel=running.context_parallel,
        )
        self._recipe.refuse_unfit(kept, cluster.ranks)
        return Proposal(kept, dict(speeds), gain, best * level, pause)


def _speed(cluster: Cluster, kind: str) -> float:
    kinds = {each.name: each.flops for each in cluster.kinds}
    return kinds[kind] / kinds[model_of(kind)]


def alike(speeds: Mapping[int, float]) -> dict[int, float]:
    """Speeds as shares of the largest; from the fastest down, those less than `ALIKE` apart have their median.

    >>> alike({0: 0.98, 1: 2.0, 2: 1.9, 3: 1.02})
    {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.5}
    """
    found: dict[int, float] = {}
    left = sorted(speeds, key=lambda rank: -speeds[rank])
    top = 0.0
    while left:
        first = speeds[left[0]]
        own = [rank for rank in left if speeds[rank] >= first * (1 - ALIKE)]
        middle = median(speeds[rank] for rank in own)
        top = top or middle
        found.update(dict.fromkeys(own, round(middle / top, 2)))
        left = [rank for rank in left if rank not in own]
    return {rank: max(0.01, found[rank]) for rank in sorted(found)}


class Watch:
    """Looks at the rates of a run, on the rank that leads it.

    Attributes:
        wants_change: a proposal was passed on with `ask`, and the ranks are to stop for it.
        ask: who takes a strategy, in a run that can change; None where it can only be proposed.
    """

    def __init__(self, recipe: Recipe, folder: Path, train_iters: int, say: Say) -> None:
        self._section: ElasticSection = recipe.elastic
        self._planner, self._folder, self._last, self._say = Planner(recipe), folder, train_iters, say
        self._rates: deque[Mapping[int, Rate]] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._looked: Mapping[int, float] = {}
        self._warm = 0
        self.wants_change = False
        self.ask: Callable[[Strategy], None] | None = None

    def look(self, program: Program, rates: Mapping[int, Rate], seconds: float, iteration: int) -> None:
        """After a step that took so long."""
        self._warm += 1
        if self._warm <= WARM_UP or self.wants_change:
            return
        if rates and all(rate.whole > 0 for rate in rates.values()):
            self._rates.append(rates)
            self._seconds.append(seconds)
        if len(self._rates) < WINDOW:
            return
        speeds = self._planner.speeds(program, _medians(self._rates))
        if min(speeds.values(), default=1.0) == 1 or not _differ(speeds, self._looked):
            return
        self._looked = speeds
        gain = self._section.straggler_gain
        left, seconds = self._last - iteration, median(self._seconds)
        try:
            proposal = self._planner.propose(program, speeds, seconds, left, gain)
        # Whatever is wrong with the planner, training goes on.
        except Exception as error:
            self._say(f"WARNING: stragglers: no plan for speeds {speeds}: {error}")
            return
        if proposal is not None:
            self._act(proposal, iteration)

    def _act(self, proposal: Proposal, iteration: int) -> None:
        path = self._folder / f"stragglers_{iteration:07d}.yaml"
        said = str(proposal)
        try:
            path.write_text(strategy_yaml(proposal.strategy, said), encoding="utf-8")
            where = f"the strategy is in {path}"
        except OSError as error:
            where = f"{path} cannot be written: {error.strerror}"
        if self._section.stragglers == "replan" and self.ask is not None:
            self._say(f"{said}; changing to it; {where}")
            self.ask(proposal.strategy)
            self.wants_change = True
        else:
            self._say(f"{said}; {where}")


def _medians(window: Sequence[Mapping[int, Rate]]) -> dict[int, Rate]:
    return {
        rank: Rate(median(each[rank].compute for each in window), median(each[rank].whole for each in window))
        for rank in window[-1]
        if all(rank in each for each in window)
    }


def _differ(now: Mapping[int, float], before: Mapping[int, float]) -> bool:
    """Whether some rank's speed is another one than when it was looked at last."""
    return any(abs(speed / before.get(rank, 1.0) - 1) >= ALIKE for rank, speed in now.items()) or any(
        rank not in now for rank in before
    )
