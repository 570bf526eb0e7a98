"""A recipe's refusals as sentences: where, what is wrong, and the name that was probably meant."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from math import isfinite
from textwrap import shorten
from typing import Any

from hetero_megatron.errors import HeteroError, RecipeError

# What Megatron, DeepSpeed and others call our keys.
ALIASES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp",
    "data_parallel_size": "dp",
    "num_micro_batches": "micro_batches",
    "gradient_clipping": "clip_grad",
    "learning_rate": "lr",
    "max_steps": "train_iters",
    "zero_stage": "zero",
    "dtype": "precision",
}
CLOSE_ENOUGH = 0.6


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` was probably meant to be, if any is close: by letters, parts in any order."""
    known = list(names)
    if ALIASES.get(word) in known:
        return ALIASES[word]
    score, best = max(((_closeness(word, name), name) for name in known), default=(0.0, ""))
    return best if score >= CLOSE_ENOUGH else None


@contextmanager
def in_section(name: str) -> Iterator[None]:
    """Say in which section a refusal of a lower floor belongs."""
    try:
        yield
    except RecipeError:
        raise
    except HeteroError as error:
        raise RecipeError(f"{name}: {error}") from error


def describe_all(errors: Sequence[Mapping[str, Any]], homes: Mapping[str, str]) -> list[str]:
    """Pydantic's errors in words; a list is not called empty because something in it is wrong."""
    places = [tuple(error["loc"]) for error in errors]

    def follows(error: Mapping[str, Any]) -> bool:
        here = tuple(error["loc"])
        return error["type"] == "too_short" and any(p[: len(here)] == here != p for p in places)

    return [describe(error, homes) for error in errors if not follows(error)]


def describe(error: Mapping[str, Any], homes: Mapping[str, str]) -> str:
    """One pydantic error as `path: what is wrong; what is right`; `homes`: the section of each known key."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    location = [*error["loc"], context["key"]] if kind == "unknown_key" else list(error["loc"])
    where = dotted(location)
    if kind == "unknown_key":
        key, known = context["key"], context["known"]
        if key in homes:
            return f"{where}: unknown key here; {key} belongs to {homes[key]}"
        if near := nearest(str(key), known):
            return f"{where}: unknown key; did you mean {near}?"
        return f"{where}: unknown key; known here: {', '.join(sorted(known))}"
    if kind == "missing":
        return f"{where}: missing; it has no default"
    if kind == "value_error":
        return f"{where}: {context['error']}" if where else str(context["error"])
    if kind == "literal_error":
        near = (
            nearest(value, re.findall(r"'([^']*)'", context["expected"])) if isinstance(value, str) else None
        )
        guess = f"; did you mean {near}?" if near else ""
        return f"{where}: {spelled(value)}, {context['expected']} is needed{guess}"
    if kind == "too_short":
        return f"{where}: is empty, at least one is needed"
    if needed := NEEDED.get(kind):
        return f"{where}: {spelled(value)}, {needed} is needed"
    return f"{where}: {value!r} does not do: {error['msg'].replace('Input should', 'it must')}"


NEEDED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def dotted(location: Iterable[object]) -> str:
    """`strategy.pipelines[0].stages[1].tp` for its parts."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def spelled(value: object) -> str:
    """What a value is, in words: `"2" is text`."""
    if value is None:
        return "nothing is given"
    if isinstance(value, bool):
        return f"{str(value).lower()} is a truth value"
    if isinstance(value, str):
        return f'"{value}" is text'
    if isinstance(value, int):
        return f"{value} is a whole number"
    if isinstance(value, float):
        return f"{value:g} is a fractional number" if isfinite(value) else f"{value} is not finite"
    kind = (
        "mapping"
        if isinstance(value, Mapping)
        else "list"
        if isinstance(value, (list, tuple))
        else type(value).__name__
    )
    return f"{shorten(str(value), 60)} is a {kind}"


def _closeness(word: str, name: str) -> float:
    parts, own = re.split(r"[_\W]+", word.lower()), name.split("_")
    if set(own) <= set(parts):
        return 0.9
    letters = SequenceMatcher(None, word.lower(), name).ratio()
    shuffled = SequenceMatcher(None, " ".join(sorted(parts)), " ".join(sorted(own))).ratio()
    return max(letters, shuffled)
