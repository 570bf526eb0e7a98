"""A profile in a file, for the model of a recipe: what the planner and a run's choice of strategies go by."""

from pathlib import Path

from hetero_megatron.errors import PlannerError, RecipeError
from hetero_megatron.planner.profiles import Profiles
from hetero_megatron.recipe import Recipe


def read_profile(path: Path | None, recipe: Recipe, key: str = "--profile") -> Profiles:
    """The profile of a file, which `key` names; without one, the analytic one.

    Raises:
        PlannerError: the file is no profile, or one of another model.
    """
    if path is None:
        return Profiles()
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
        own = getattr(config, name, None)
        if own != measured:
            raise PlannerError(
                f"{path}: measured with {name} {measured}, the recipe's model has {own}; "
                "profile this recipe's model"
            )
    return profiles
