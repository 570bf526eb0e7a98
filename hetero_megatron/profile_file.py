"""What the planner goes by in a recipe's run: a profile in a file, or published figures."""

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.errors import PlannerError, RecipeError
from hetero_megatron.planner.profiles import Profiles

if TYPE_CHECKING:
    from hetero_megatron.recipe import Recipe


def profiles_of(recipe: "Recipe", given: Path | None = None) -> Profiles:
    """The times of the file `given` with --profile, else of the recipe's `planning.profile`, else published figures.

    Raises:
        RecipeError: the file cannot be read.
        PlannerError: it is no profile, or one of another model.
    """
    own = recipe.planning.profile
    if given is None and own is None:
        return Profiles()
    path, key = (given, "--profile") if given is not None else (Path(own or ""), "planning.profile")
    try:
        profiles = Profiles.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{key}: {path} is not UTF-8 text: byte {error.start} is invalid") from error
    except PlannerError as error:
        raise PlannerError(f"{path}: {error}") from error
    config = recipe.make_config()
    for name, measured in profiles.model.items():
        wanted = getattr(config, name, None)
        if wanted != measured:
            raise PlannerError(
                f"{path}: measured with {name} {measured}, the recipe's model has {wanted}; "
                "profile this recipe's model"
            )
    return profiles
