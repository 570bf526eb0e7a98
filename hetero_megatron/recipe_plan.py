"""What a recipe's `strategy: auto` means: the planner on its model, cluster and training sections (paper A.1)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.planner.solver import Solver

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.recipe import Recipe
    from hetero_megatron.strategy import Strategy


def problem_of(recipe: "Recipe", choices: Choices | None = None) -> Problem:
    """What is to be planned: model, devices, rows a step and tokens a row."""
    training = recipe.training
    return Problem(
        recipe.make_config(),
        recipe.make_cluster(),
        training.global_batch_size,
        training.seq_length,
        choices or Choices(),
    )


def costs_of(recipe: "Recipe", problem: Problem, profiles: Profiles | None = None) -> Costs:
    """The cost model of a recipe's model, devices and precision."""
    return Costs(
        problem.config,
        problem.cluster,
        profiles or Profiles(),
        problem.seq_length,
        recipe.training.precision,
    )


def problem_under(
    recipe: "Recipe", written: "Strategy", cluster: "Cluster", profiles: Profiles | None = None
) -> tuple[Problem, Costs]:
    """The planner's view of a run, under what its strategy has decided for good: ZeRO and how parallel parts share."""
    cp = () if recipe.kernels.attention == "auto" else (1,)
    problem = replace(problem_of(recipe, Choices(zero=(written.zero,), context_parallel=cp)), cluster=cluster)
    return problem, Costs(
        problem.config,
        cluster,
        profiles,
        problem.seq_length,
        recipe.training.precision,
        written.sequence_parallel,
        written.context_parallel,
        recipe.training.bucket_size,
    )


def plan_recipe(
    recipe: "Recipe",
    choices: Choices | None = None,
    profiles: Profiles | None = None,
    solver: Solver | None = None,
) -> Plan:
    """The plan for a recipe; a strategy that it has is not looked at.

    Raises:
        RecipeError: there is no cluster to plan for.
        PlannerError: nothing fits.
    """
    problem = problem_of(recipe, choices)
    return make_plan(problem, costs_of(recipe, problem, profiles), solver)
