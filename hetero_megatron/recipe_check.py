"""Whether the sections of a recipe fit each other."""

from typing import TYPE_CHECKING

from hetero_megatron.cluster import Cluster, ranges_text
from hetero_megatron.data.dispatch import deal
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.chooser import NamedStrategy
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.recipe_data import check_tokens
from hetero_megatron.recipe_refusals import in_section
from hetero_megatron.strategy import Strategy

if TYPE_CHECKING:
    from hetero_megatron.recipe import Recipe


def check_recipe(recipe: "Recipe") -> None:
    """Refuse a recipe whose sections do not fit each other.

    Raises:
        RecipeError: naming the section and what would be right.
    """
    with in_section("model"):
        config = recipe.make_config()
    check_tokens("data", recipe.data, config.vocab_size)
    if recipe.evaluation is not None:
        check_tokens("evaluation.data", recipe.evaluation.data, config.vocab_size)
    if config.sliding_window is not None and recipe.training.seq_length > config.sliding_window:
        raise RecipeError(
            f"training.seq_length: {recipe.training.seq_length} exceeds the model's sliding_window "
            f"{config.sliding_window}; attention looks back over the whole document, so seq_length must be "
            "at most the window"
        )
    with in_section("model.weights"):
        recipe.open_weights()
    with in_section("cluster"):
        cluster = recipe.make_cluster()
    if recipe.planning.profile is not None:
        profiles_of(recipe)
    with in_section("strategy"):
        strategy = recipe.make_strategy()
        strategy.check(config.facts, cluster.ranks)
        _check_several(recipe, config, cluster)
    recipe.make_prepared()
    sections = {"data": recipe.data} | (
        {"evaluation.data": recipe.evaluation.data} if recipe.evaluation else {}
    )
    in_rows = [name for name, section in sections.items() if section.packing == "rows"]
    if in_rows:
        # Of several strategies rows are for the one that evaluation takes: to train on, they need documents.
        check_rows(recipe, recipe.make_strategies()[recipe.evaluates].strategy, in_rows[0])


def _check_several(recipe: "Recipe", config: LlamaConfig, cluster: Cluster) -> None:
    """Strategies that a run switches between have the same ranks, for optimizer states stay where they are."""
    if recipe.strategy.several is None:
        return
    if recipe.data.packing != "documents":
        raise RecipeError(
            "several strategies are chosen by the lengths of a step's documents, and data.packing rows has none; use "
            "packing: documents, or one strategy"
        )
    if recipe.elastic.stragglers != "ignore":
        raise RecipeError(
            f"elastic.stragglers: {recipe.elastic.stragglers} plans one strategy for the measured speeds, and the recipe has "
            "several; leave it out, or write one strategy"
        )
    named = recipe.make_strategies()
    for each in named:
        try:
            each.strategy.check(config.facts, cluster.ranks)
        except HeteroError as error:
            raise RecipeError(f"strategy {each.name!r}: {error}") from error
        if each.strategy.schedule_tasks:
            raise RecipeError(
                f"strategy {each.name!r}: schedule {each.strategy.schedule} is for one number of micro-batches, and the "
                "documents of a step decide how many there are; use a schedule by name"
            )
        for what in ("ranks", "zero", "offload_optimizer"):
            first, own = getattr(named[0].strategy, what), getattr(each.strategy, what)
            if first != own:
                told = [ranges_text(value) if what == "ranks" else value for value in (first, own)]
                raise RecipeError(
                    f"strategies {named[0].name!r} and {each.name!r} have {what} {told[0]} and {told[1]}; optimizer "
                    f"states stay where they are when the strategy changes, so all need the same {what}"
                )
    longest = max(longest_document(each, recipe.training.seq_length) for each in named)
    if longest < recipe.training.seq_length:
        raise RecipeError(
            f"no strategy takes a document of training.seq_length {recipe.training.seq_length} tokens: they hold up to "
            f"{longest}; raise max_length and max_tokens of one, or lower seq_length"
        )


def longest_document(named: NamedStrategy, seq_length: int) -> int:
    """The longest document that a strategy of several takes, in tokens."""
    tokens = max(pipeline.tokens(seq_length) for pipeline in named.strategy.pipelines)
    return min(named.max_length or tokens, tokens)


def check_rows(recipe: "Recipe", strategy: Strategy, section: str) -> None:
    """A step's rows, which `section` makes, must find a place, whole."""
    for number, pipeline in enumerate(strategy.pipelines):
        rows = pipeline.micro_batch_size * recipe.training.seq_length
        if pipeline.tokens(recipe.training.seq_length) < rows:
            raise RecipeError(
                f"strategy.pipelines[{number}].max_tokens: {pipeline.max_tokens} is less than micro_batch_size "
                f"{pipeline.micro_batch_size} x seq_length {recipe.training.seq_length} = {rows}, and {section}.packing "
                "rows makes whole rows; use packing: documents, or leave max_tokens out"
            )
    with in_section("training.global_batch_size"):
        deal(
            recipe.training.global_batch_size,
            [(p.micro_batches, p.micro_batch_size) for p in strategy.pipelines],
        )
