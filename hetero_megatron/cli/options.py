"""Arguments and options that several commands have: a recipe, changes to it, and JSON in place of tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_megatron.recipe import Recipe

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/quickstart.yaml.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as training.lr=1e-4.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="The same, as an option; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def recipe_of(file: Path, overrides: list[str] | None, settings: list[str] | None) -> "Recipe":
    """The recipe in `file`, changed, and checked.

    Raises:
        RecipeError: whatever is wrong with it.
    """
    from hetero_megatron.recipe import load_recipe

    return load_recipe(file, [*(overrides or ()), *(settings or ())])
