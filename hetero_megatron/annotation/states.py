"""How a tensor is sharded over one device group (paper §4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.annotation.region import FULL, Region
from hetero_megatron.errors import AnnotationError

DUPLICATE = -1
PARTIAL = -2
_NAMES = {DUPLICATE: "duplicate", PARTIAL: "partial"}


@dataclass(frozen=True, slots=True)
class DistributedStates:
    """An ordered map dim -> parts: dim >= 0 Split, -1 Duplicate, -2 Partial.

    The device index is mixed radix over the order; the last dim varies fastest. A dim that is not cut is
    not listed, so one layout has one spelling per order.

    >>> [str(DistributedStates(((1, 2), (0, 2))).coord(i)) for i in (1, 2)]
    ['{1: 0, 0: 1}', '{1: 1, 0: 0}']
    """

    order: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        dims = [dim for dim, _ in self.order]
        if len(set(dims)) != len(dims):
            raise AnnotationError(f"states {self} list a dim twice")
        for dim, parts in self.order:
            if dim < PARTIAL:
                raise AnnotationError(f"states {self}: dim {dim} is neither a tensor dim nor -1 nor -2")
            if parts < 2:
                raise AnnotationError(
                    f"states {self}: dim {dim} has {parts} parts; list a dim only when it has 2 or more"
                )

    @staticmethod
    def of(parts: Mapping[int, int]) -> "DistributedStates":
        """States in the mapping's order; dims with one part are dropped."""
        return DistributedStates(tuple((dim, count) for dim, count in parts.items() if count != 1))

    @property
    def degree(self) -> int:
        """Number of devices that these states describe."""
        product = 1
        for _, parts in self.order:
            product *= parts
        return product

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The tensor dims that are split, ascending."""
        return tuple(sorted(dim for dim, _ in self.order if dim >= 0))

    def parts(self, dim: int) -> int:
        """Number of parts along `dim`; 1 when it is not listed."""
        return next((parts for listed, parts in self.order if listed == dim), 1)

    def coord(self, index: int) -> dict[int, int]:
        """Position of device `index` along every listed dim."""
        if not 0 <= index < self.degree:
            raise AnnotationError(
                f"states {self} cover {self.degree} devices, there is no device index {index}"
            )
        digits: dict[int, int] = {}
        for dim, parts in reversed(self.order):
            index, digits[dim] = divmod(index, parts)
        return {dim: digits[dim] for dim, _ in self.order}

    def region(self, index: int, inside: Region = FULL) -> Region:
        """The part of `inside` that device `index` holds."""
        region = inside
        for dim, place in self.coord(index).items():
            if dim >= 0:
                region = region.cut(dim, place, self.parts(dim))
        return region

    def with_parts(self, parts: Mapping[int, int]) -> "DistributedStates":
        """The same order with some counts replaced; a new dim is appended."""
        merged = dict(self.order) | dict(parts)
        return DistributedStates.of(merged)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{_NAMES.get(dim, dim)}: {parts}" for dim, parts in self.order) + "}"
