"""The programs that an elastic run goes on with when other ranks are there than before (paper A.1, scenario b)."""

from hetero_megatron.graph.nodes import Graph
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.shrink import shrink
from hetero_megatron.strategy import Strategy


class NextProgram:
    """From the ranks that are there to a program for them: a prepared one where a plan file is for exactly these ranks,
    otherwise the recipe's own strategy without the ranks that are gone.

    A pure function of its arguments: every rank calls it and goes on with its own result.
    """

    def __init__(self, recipe: Recipe, config: LlamaConfig, graph: Graph) -> None:
        """Nothing is built yet."""
        self._facts, self._graph = config.facts, graph
        self._cluster = recipe.make_cluster()
        self._written = recipe.make_strategy()
        self._prepared = recipe.make_prepared()

    def __call__(self, base: Program, ranks: tuple[int, ...]) -> Program:
        """The program for `ranks`, in place of `base`, whose layout the state is in."""
        del base
        return self.of(self.strategy(ranks), ranks)

    def of(self, strategy: Strategy, ranks: tuple[int, ...]) -> Program:
        """The program of a strategy on the devices of `ranks`."""
        there = self._cluster.without(set(self._cluster.ranks) - set(ranks))
        return Program.build(self._graph, strategy, self._facts, there)

    def strategy(self, ranks: tuple[int, ...]) -> Strategy:
        """The strategy for `ranks`."""
        made = [each for each in (self._written, *self._prepared) if is_for(each, ranks)]
        best = max(made, key=lambda each: len(each.ranks), default=self._written)
        return shrink(best, self._facts, ranks)


def is_for(strategy: Strategy, ranks: tuple[int, ...]) -> bool:
    """Whether a strategy was made for exactly these ranks: its own are all there, and it knows the others as idle.

    Ranks that it calls idle may be gone.
    """
    there = set(ranks)
    return set(strategy.ranks) <= there <= set(strategy.ranks) | set(strategy.idle_ranks)
