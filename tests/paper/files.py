"""The recipes of `recipes/paper`, read for tests."""

from functools import cache
from pathlib import Path

import pytest

from hetero_megatron.errors import HeteroError
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_text import read_yaml

FOLDER = Path(__file__).parent.parent.parent / "recipes" / "paper"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
NOT_BUILT = "not built yet"


@cache
def written(name: str) -> Recipe:
    """The recipe as it is written: keys and types are checked, whether it fits together is not."""
    return Recipe.model_validate(read_yaml(FOLDER / f"{name}.yaml"))


def ready(name: str) -> Recipe:
    """The recipe, checked; the test is skipped while something that the recipe needs is not built yet."""
    recipe = written(name)
    try:
        recipe.check()
    except HeteroError as error:
        if NOT_BUILT not in str(error):
            raise
        pytest.skip(str(error))
    return recipe
