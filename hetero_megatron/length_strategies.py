"""Strategies by document length in a run: who chooses, and where a rank stands in each of them (paper A.1, scenario c)."""

from collections.abc import Sequence

from hetero_megatron.data.loader import Place
from hetero_megatron.data.samples import Samples
from hetero_megatron.data.strategy_packing import StrategyPacking
from hetero_megatron.planner.chooser import StepChooser
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.planner.small_batches import SmallBatchCosts
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe


def length_costs(recipe: Recipe, profiles: Profiles | None = None) -> SmallBatchCosts:
    """What documents cost under a recipe's model, devices and precision."""
    strategy = None if recipe.strategy.auto else recipe.make_strategy()
    return SmallBatchCosts(
        recipe.make_config(),
        recipe.make_cluster(),
        profiles_of(recipe) if profiles is None else profiles,
        recipe.training.seq_length,
        recipe.training.precision,
        strategy.sequence_parallel if strategy else True,
        strategy.context_parallel if strategy else "ring",
        recipe.training.bucket_size,
    )


def make_chooser(recipe: Recipe) -> StepChooser:
    """Who chooses among the recipe's strategies, step by step.

    Raises:
        RecipeError: a strategy's plan file does not do.
    """
    return StepChooser(recipe.make_strategies(), length_costs(recipe))


def strategy_packing(recipe: Recipe, samples: Samples) -> StrategyPacking:
    """A step's documents over the pipelines of the strategy that suits them: what a run's loader shares by.

    Raises:
        PlannerError: no strategy holds a document of seq_length tokens.
    """
    return StrategyPacking(samples, recipe.training.seq_length, make_chooser(recipe))


def places_of(programs: Sequence[Program], rank: int) -> tuple[Place, ...]:
    """Where a rank stands in each program, for its loader; None where it has no work."""
    found: list[Place] = []
    for program in programs:
        if rank in program.strategy.ranks:
            number, _ = program.pipeline_of(rank)
            found.append((number, program.token_multiple(number)))
        else:
            found.append(None)
    return tuple(found)
