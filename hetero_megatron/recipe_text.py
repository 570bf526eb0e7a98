"""A recipe's text as plain values: strict YAML 1.2, overrides, lists and ranges of numbers."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hetero_megatron.errors import RecipeError
from hetero_megatron.recipe_refusals import nearest, spelled
from hetero_megatron.strategy_check import RECOMPUTE

LONGEST_LIST = 10_000


def read_yaml(path: Path) -> object:
    """The plain value of a YAML 1.2 file: `1e-4` is a number, `on` is text, a key may stand once.

    Raises:
        RecipeError: the file is missing, cut off or malformed; with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 text: byte {error.start} is invalid") from error
    return _parse(text, str(path), "is the file cut off?")


def apply_overrides(value: object, overrides: Iterable[str], shorthands: Mapping[str, str]) -> object:
    """`value` changed in place by overrides such as `training.lr=1e-4` or `strategy.zero=1`.

    `shorthands` says which key a section's bare text stands for: `model: llama_tiny` is `model.preset`.

    Raises:
        RecipeError: an override is no `path=value`, or its path leads through something that has no parts.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = re.findall(r"[^.\[\]]+", path.strip())
        if not equals or not keys:
            raise RecipeError(f"override {override!r}: write path=value, for example training.lr=1e-4")
        here = value
        for depth, key in enumerate(keys[:-1]):
            below = _child(here, key, override)
            if isinstance(below, str) and depth == 0 and key in shorthands:
                below = {shorthands[key]: below}
            elif below is None:
                below = {}
            _assign(here, key, below, override)
            here = below
        _assign(here, keys[-1], _parse(text, f"override {override!r}", "write one YAML value"), override)
    return value


def number_list(value: object) -> tuple[int, ...]:
    """Numbers written as `3`, `[0, 1, 2]`, `0-3` or `28-31, 3`.

    Raises:
        RecipeError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(number for part in value for number in number_list(part))
    if isinstance(value, str):
        numbers: list[int] = []
        for part in value.split(","):
            first, last = _span(part, value)
            if last - first >= LONGEST_LIST:
                raise RecipeError(
                    f"{value!r} lists {last - first + 1} numbers; at most {LONGEST_LIST} can be meant"
                )
            numbers.extend(range(first, last + 1))
        return tuple(numbers)
    raise RecipeError(f"{spelled(value)}; write a number, a list such as [0, 1, 2], or a range such as 0-3")


def degrees(value: object) -> int | tuple[int, ...] | None:
    """A degree of 1 or more, or a list of them.

    Raises:
        RecipeError: anything else.
    """
    if value is None or (type(value) is int and value >= 1):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(each) is int and each >= 1 for each in value):
        return tuple(value)
    if type(value) is int:
        raise RecipeError(f"{value} is too small; write 1 or more")
    if isinstance(value, (list, tuple)):
        raise RecipeError(
            f"{spelled(value)}; a list names one degree, 1 or more, for each context-parallel part"
        )
    raise RecipeError(f"{spelled(value)}, a whole number is needed, or a list of them")


def layer_ranges(value: object) -> tuple[tuple[int, int], ...] | None:
    """Layers written as `0-14`, `[0, 14]`, a single number, or null for none; `0-3, 8-11` for several chunks.

    Raises:
        RecipeError: anything else.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return ((value, value),)
    if isinstance(value, str):
        return tuple(_span(part, value) for part in value.split(","))
    if isinstance(value, (list, tuple)) and value:
        if len(value) == 2 and all(type(end) is int for end in value):
            return ((value[0], value[1]),)
        if all(isinstance(part, str) for part in value):
            return tuple(_span(part, part) for part in value)
    raise RecipeError(
        f"{spelled(value)}; write layers as first-last, such as 0-14, or [0, 14], or one number, "
        "and several chunks as 0-3, 8-11"
    )


def recomputed(value: object) -> object:
    """A `recompute` key as it is written: `none`, `full`, `selective`, or layers of the last two.

    Raises:
        RecipeError: anything else.
    """
    if isinstance(value, Mapping):
        for kind, layers in value.items():
            if kind not in RECOMPUTE:
                near = nearest(str(kind), RECOMPUTE)
                guess = f"; did you mean {near}?" if near else ""
                raise RecipeError(f"there is no {kind!r}; known: {', '.join(RECOMPUTE)}{guess}")
            layer_ranges(layers)
    elif value not in ("none", *RECOMPUTE):
        raise RecipeError(
            f"{spelled(value)}; write none, full or selective, or the layers of each, such as "
            "{full: 0-3, selective: 4-7}"
        )
    return value


def _parse(text: str, source: str, hint: str) -> object:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "([^"]*)"', str(error.problem))
        raise RecipeError(f"{source}, {_line(error)}: key {key and key[1]!r} stands here twice") from error
    except MarkedYAMLError as error:
        raise RecipeError(
            f"{source}, {_line(error)}: {error.problem}{_began(error)}{_remedy(error, hint)}"
        ) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not YAML: {error}") from error


def _line(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}" if mark else "somewhere"


def _began(error: MarkedYAMLError) -> str:
    if not error.context:
        return ""
    first, last = error.context_mark, error.problem_mark
    where = f" that began in line {first.line + 1}" if first and last and first.line < last.line else ""
    return f" ({error.context}{where})"


def _remedy(error: MarkedYAMLError, at_the_end: str) -> str:
    problem = str(error.problem)
    if "stream" in problem:
        return f"; {at_the_end}"
    return "; indent with spaces" if r"'\t'" in problem else ""


def _child(here: object, key: str, override: str) -> object:
    if isinstance(here, dict):
        return here.get(key)
    if isinstance(here, list):
        return here[_position(here, key, override)]
    raise RecipeError(f"override {override!r}: there is no {key!r} inside {here!r}, which has no parts")


def _assign(here: object, key: str, below: object, override: str) -> None:
    if isinstance(here, list):
        here[_position(here, key, override)] = below
    elif isinstance(here, dict):
        here[key] = below
    else:
        raise RecipeError(f"override {override!r}: there is no {key!r} inside {here!r}, which has no parts")


def _position(here: list[object], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(here):
        raise RecipeError(
            f"override {override!r}: {key!r} is no place in a list of {len(here)}; write 0 to {len(here) - 1}"
        )
    return int(key)


def _span(text: str, whole: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text)
    if not found:
        raise RecipeError(f'"{whole}" is no range; write one such as 0-3')
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise RecipeError(f'"{whole}" runs backwards; write {last}-{first}')
    return first, last
