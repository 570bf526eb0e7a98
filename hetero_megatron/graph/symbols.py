"""Dims that are known only when data arrives, and what strategies demand of them (paper A.2)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetero_megatron.annotation import Annotation
from hetero_megatron.errors import GraphError


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that arrives with the data, or its `divisor`-th part; `T` is one pipeline's tokens.

    >>> str(Symbol("T").split(2))
    'T/2'
    """

    name: str
    divisor: int = 1

    def split(self, parts: int) -> "Symbol":
        """The size of one of `parts` equal parts."""
        return Symbol(self.name, self.divisor * parts)

    def resolve(self, sizes: Mapping[str, int]) -> int:
        """The number behind the symbol.

        Raises:
            GraphError: the size is not given or does not divide.
        """
        Constraint(self.name, self.divisor).check(sizes)
        return sizes[self.name] // self.divisor

    def __str__(self) -> str:
        return self.name if self.divisor == 1 else f"{self.name}/{self.divisor}"


Dim = int | Symbol
Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`symbol` must divide by `divisor`, because the value `where` is cut into that many equal parts."""

    symbol: str
    divisor: int
    where: str = ""

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuse sizes that break the constraint.

        Raises:
            GraphError: the symbol's size is missing or leaves a remainder.
        """
        if self.symbol not in sizes:
            raise GraphError(f"no size is given for {self.symbol}; given: {sorted(sizes)}")
        size = sizes[self.symbol]
        if size % self.divisor:
            cause = f": {self.where} is cut into {self.divisor} equal parts" if self.where else ""
            up = size + self.divisor - size % self.divisor
            raise GraphError(
                f"{self.symbol} is {size}, but must divide by {self.divisor}{cause}; pad it to {up}"
            )


def constraints_of(
    name: str, shape: Shape, annotation: Annotation, subgroups: Iterable[int]
) -> set[Constraint]:
    """What the value `name` demands of its symbols in these subgroups.

    The top tier asks for nothing: every subgroup has its own tokens, so there `T` is another number.
    """
    found: set[Constraint] = set()
    for place, dim in enumerate(shape):
        if isinstance(dim, Symbol):
            for subgroup in subgroups:
                if (parts := annotation.states[subgroup].parts(place)) > 1:
                    found.add(Constraint(dim.name, dim.divisor * parts, name))
    return found


def local_shape(shape: Shape, annotation: Annotation, rank: int) -> Shape:
    """The shape of `rank`'s shard; symbols stay symbols.

    >>> str(local_shape((Symbol("T"), 32), Annotation.on((0, 1), {0: 2}), 1)[0])
    'T/2'
    """
    known = tuple(0 if isinstance(dim, Symbol) else dim for dim in shape)
    bounds = annotation.region(rank).bounds(known)
    subgroup = annotation.subgroup_of(rank) or 0
    return tuple(
        dim.split(annotation.states[subgroup].parts(place)) if isinstance(dim, Symbol) else hi - lo
        for place, (dim, (lo, hi)) in enumerate(zip(shape, bounds, strict=True))
    )
