"""The annotation plan: what a strategy says about every leaf and every Reshard, as versioned JSON (paper §3, §8)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hetero_megatron.annotation.annotation import Annotation
from hetero_megatron.annotation.device_group import DeviceGroup
from hetero_megatron.annotation.states import DUPLICATE, DistributedStates
from hetero_megatron.errors import AnnotationError

VERSION = 1
_TOP = ("version", "annotations")
_ENTRY = ("groups", "states", "hdim")


@dataclass(frozen=True)
class AnnotationPlan(Mapping[str, Annotation]):
    """Annotations by leaf or Reshard name; an immutable mapping.

    The JSON form is `{"version": 1, "annotations": {name: {"groups": [[0, 1], [2]],
    "states": [[[0, 2]], []], "hdim": -1}}}`: states are lists of [dim, parts] in order.
    """

    entries: Mapping[str, Annotation]

    def __getitem__(self, name: str) -> Annotation:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def to_json(self) -> str:
        """The plan as JSON text, names in plan order."""
        body = {
            name: {
                "groups": [list(group) for group in annotation.groups],
                "states": [[list(pair) for pair in states.order] for states in annotation.states],
                "hdim": annotation.hdim,
            }
            for name, annotation in self.entries.items()
        }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in body.items())
        return f'{{"version": {VERSION}, "annotations": {{\n{lines}\n}}}}\n'

    @staticmethod
    def from_json(text: str) -> "AnnotationPlan":
        """Read a plan; unknown or duplicate keys, other versions and wrong types are refused with their path."""
        try:
            body = json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise AnnotationError(f"plan is not JSON: line {error.lineno}: {error.msg}") from None
        top = _mapping(body, "plan")
        _known(top, _TOP, "plan")
        if top["version"] != VERSION:
            raise AnnotationError(f"plan.version is {top['version']!r}, this library reads version {VERSION}")
        annotations = _mapping(top["annotations"], "annotations")
        return AnnotationPlan(
            {name: _entry(f"annotations.{name}", entry) for name, entry in annotations.items()}
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise AnnotationError(f"plan: key {key!r} stands twice in one object")
    return dict(pairs)


def _mapping(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise AnnotationError(f"{path} must be an object, found {type(value).__name__}")
    return value


def _known(found: Mapping[str, object], wanted: tuple[str, ...], path: str) -> None:
    for key in found:
        if key not in wanted:
            near = get_close_matches(key, wanted, 1)
            raise AnnotationError(
                f"{path}.{key} is unknown; " + (f"did you mean {near[0]!r}?" if near else f"known: {wanted}")
            )
    for key in wanted:
        if key not in found:
            raise AnnotationError(f"{path}.{key} is missing")


def _entry(path: str, value: object) -> Annotation:
    entry = _mapping(value, path)
    _known(entry, _ENTRY, path)
    groups = _integers(entry["groups"], f"{path}.groups", 2)
    states = _integers(entry["states"], f"{path}.states", 3)
    if not isinstance(entry["hdim"], int) or isinstance(entry["hdim"], bool):
        raise AnnotationError(
            f"{path}.hdim must be a whole number, found {entry['hdim']!r} (duplicate is {DUPLICATE})"
        )
    try:
        return Annotation(
            tuple(DeviceGroup(tuple(group)) for group in groups),
            tuple(DistributedStates(tuple((dim, parts) for dim, parts in order)) for order in states),
            entry["hdim"],
        )
    except (AnnotationError, TypeError, ValueError) as error:
        raise AnnotationError(f"{path}: {error}") from None


def _integers(value: object, path: str, depth: int) -> list[Any]:
    """`value` as a list nested `depth` deep that ends in whole numbers."""
    if not isinstance(value, list):
        raise AnnotationError(f"{path} must be a list, found {value!r}")
    for index, item in enumerate(value):
        if depth > 1:
            _integers(item, f"{path}[{index}]", depth - 1)
        elif not isinstance(item, int) or isinstance(item, bool):
            raise AnnotationError(f"{path}[{index}] must be a whole number, found {item!r}")
    return value
