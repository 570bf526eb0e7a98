"""What a recipe's `strategy: auto` means: the planner on its model, cluster and training sections (paper A.1)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.planner.solver import Solver
from hetero_megatron.profile_file import profiles_of

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
    """The cost model of a recipe's model, devices and precision; by the recipe's profile unless another is given."""
    return Costs(
        problem.config,
        problem.cluster,
        profiles_of(recipe) if profiles is None else profiles,
        problem.seq_length,
        recipe.training.precision,
    )


def costs_under(
    recipe: "Recipe", strategy: "Strategy", cluster: "Cluster", profiles: Profiles | None = None
) -> Costs:
    """The cost model of a recipe's model on these devices, as a strategy shares work; `profiles` in place of its own."""
    return Costs(
        recipe.make_config(),
        cluster,
        profiles_of(recipe) if profiles is None else profiles,
        recipe.training.seq_length,
        recipe.training.precision,
        strategy.sequence_parallel,
        strategy.context_parallel,
        recipe.training.bucket_size,
    )


def problem_under(
    recipe: "Recipe", written: "Strategy", cluster: "Cluster", profiles: Profiles | None = None
) -> tuple[Problem, Costs]:
    """The planner's view of a run, under what its strategy has decided for good: ZeRO and how parallel parts share."""
    cp = () if recipe.kernels.attention == "auto" else (1,)
    problem = replace(problem_of(recipe, Choices(zero=(written.zero,), context_parallel=cp)), cluster=cluster)
    return problem, costs_under(recipe, written, cluster, profiles)


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


def planned_by(recipe: "Recipe", plan: Plan) -> str:
    """What a run says of the plan that its `strategy: auto` became."""
    profile = recipe.planning.profile
    times = f"the times of {profile}" if profile else "published figures (`profile` measures this machine)"
    even = plan.homogeneous
    text = (
        f"strategy: auto: {plan.best.seconds:.4g} s a step predicted by {times}, {100 * plan.gap:.0f}% above the bound "
        f"of these devices; {plan.method}, in {plan.seconds:.2f} s"
    )
    if even is not None:
        text += f"; the best homogeneous strategy: {even.seconds:.4g} s"
    return "; ".join((text, *plan.notes))
