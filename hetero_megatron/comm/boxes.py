"""Arithmetic on regions of one tensor: sizes, and joining neighbours into larger boxes (paper §5.2)."""

from collections.abc import Hashable, Iterable
from fractions import Fraction
from typing import TypeVar

from hetero_megatron.annotation import Region

Key = TypeVar("Key", bound=Hashable)


def numel(region: Region, shape: tuple[int, ...]) -> int:
    """Elements of `region` in a tensor of `shape`."""
    count = 1
    for lo, hi in region.bounds(shape):
        count *= hi - lo
    return count


def join_boxes(pieces: Iterable[tuple[Key, Region]]) -> tuple[tuple[Key, Region], ...]:
    """Join boxes that have the same key and touch along one dim, so that fewer, larger boxes remain.

    >>> half = [("a", Region().cut(0, 0, 2)), ("a", Region().cut(0, 1, 2))]
    >>> [(key, str(region)) for key, region in join_boxes(half)]
    [('a', '[whole]')]
    """
    boxes = list(pieces)
    if len({key for key, _ in boxes}) == len(boxes):
        return tuple(boxes)
    for dim in sorted({dim for _, region in boxes for dim, _, _ in region.cuts}, reverse=True):
        boxes = _join_along(dim, boxes)
    return tuple(boxes)


def _join_along(dim: int, boxes: list[tuple[Key, Region]]) -> list[tuple[Key, Region]]:
    lines: dict[tuple[Key, tuple[tuple[int, Fraction, Fraction], ...]], list[Region]] = {}
    for key, region in boxes:
        lines.setdefault((key, tuple(cut for cut in region.cuts if cut[0] != dim)), []).append(region)
    joined: list[tuple[Key, Region]] = []
    for (key, _), line in lines.items():
        last: Region | None = None
        for region in sorted(line, key=lambda box: box.span(dim)) if len(line) > 1 else line:
            if last is not None and last.span(dim)[1] == region.span(dim)[0]:
                last = last.with_span(dim, last.span(dim)[0], region.span(dim)[1])
            else:
                if last is not None:
                    joined.append((key, last))
                last = region
        if last is not None:
            joined.append((key, last))
    return joined
