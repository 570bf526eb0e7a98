"""The programs that an elastic run goes on with when other ranks are there than before (paper A.1, scenario b)."""

from dataclasses import replace

from hetero_megatron.errors import HeteroError
from hetero_megatron.graph.nodes import Graph
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.replan import replan
from hetero_megatron.planner.solver import NONE, Solver
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_plan import problem_under
from hetero_megatron.shrink import shrink
from hetero_megatron.strategy import Strategy


class NextProgram:
    """From the ranks that are there to a program for them: a prepared one where a plan file is for exactly these ranks,
    else what the planner makes of them, else the recipe's own strategy without the ranks that are gone.
    """

    def __init__(self, recipe: Recipe, config: LlamaConfig, graph: Graph) -> None:
        """Plan once for all devices of the recipe, before training: later plans use what this one has found."""
        self._recipe, self._facts, self._graph = recipe, config.facts, graph
        self._cluster = recipe.make_cluster()
        self._written = recipe.make_strategy()
        self._prepared = recipe.make_prepared()
        self._plan: Plan | None = None
        self.refusal = "elastic.replan is keep"
        if recipe.elastic.replan == "planner":
            try:
                self._plan = make_plan(*problem_under(recipe, self._written, self._cluster), Solver(NONE))
            except HeteroError as error:
                self.refusal = str(error)

    def program(self, strategy: Strategy, ranks: tuple[int, ...]) -> Program:
        """The program of a strategy when `ranks` are there."""
        there = self._cluster.without(set(self._cluster.ranks) - set(ranks))
        return Program.build(self._graph, strategy, self._facts, there)

    def strategy(self, base: Program | None, ranks: tuple[int, ...]) -> tuple[Strategy, str]:
        """The strategy for `ranks`, and who made it or why not the planner.

        `base` is the program whose layout the state is in; None before the run, when there is no state.
        """
        exact = [each for each in (self._written, *self._prepared) if is_for(each, ranks)]
        if exact:
            best = max(exact, key=lambda each: len(each.ranks))
            return shrink(best, self._facts, ranks), "" if best is self._written else "a prepared plan"
        told = self.refusal
        if self._plan is not None:
            try:
                return self._planned(self._plan, base, ranks)
            # Whatever is wrong with the planner, a run that has lost ranks goes on.
            except Exception as error:
                told = (
                    f"{type(error).__name__}: {error}" if not isinstance(error, HeteroError) else str(error)
                )
        return shrink(self._written, self._facts, ranks), f"the strategy without the lost ranks ({told})"

    def _planned(self, plan: Plan, base: Program | None, ranks: tuple[int, ...]) -> tuple[Strategy, str]:
        """What the planner makes of `ranks`.

        Raises:
            HeteroError: nothing fits, or not this run's model and steps.
        """
        gone = set(self._cluster.ranks) - set(ranks)
        running = self._written if base is None else base.strategy
        # What no survivor has comes from copies or a checkpoint, under whatever strategy is best then.
        found = replan(plan, gone, running=running, copied=gone)
        own = self._written
        strategy = replace(
            found.best.strategy,
            sequence_parallel=own.sequence_parallel,
            context_parallel=own.context_parallel,
            offload_optimizer=own.offload_optimizer,
        )
        self._recipe.refuse_unfit(strategy, ranks)
        return strategy, f"planned: {found.best.seconds:.4g} s a step predicted"


def is_for(strategy: Strategy, ranks: tuple[int, ...]) -> bool:
    """Whether a strategy was made for exactly these ranks: its own are all there, and it knows the others as idle.

    Ranks that it calls idle may be gone.
    """
    there = set(ranks)
    return set(strategy.ranks) <= there <= set(strategy.ranks) | set(strategy.idle_ranks)
