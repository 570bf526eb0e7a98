"""What an operator does to the dims of its operands, in einsum spelling (paper §6.1, Figure 13)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hetero_megatron.errors import GraphError

Dims = tuple[tuple[str, ...], ...]
"""The factors of every dim of one tensor, major first; a plain dim has one factor, `(g r k)` has three."""

_DIM = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True)
class Signature:
    """Which factors the dims of the operands and of the output stand for, and which of them may be cut.

    Operands are the call's arguments in order, then the module's own parameters in the order of
    `named_parameters(recurse=False)`. Arguments named after ';' are opaque: every rank has its own.

    Attributes:
        indivisible: factors that no device may hold a part of.
        exact: factors whose size must divide by their parts (heads); others may be cut unevenly.
        reduced: factors that the operator sums inside, with its own communication; its output is then whole.
        linear: linear in each operand, so a Partial operand gives a Partial output.
        additive: linear in all operands together (a sum), so Partial operands must all be Partial.

    >>> Signature.parse("t i, o i -> t o", linear=True).output
    (('t',), ('o',))
    """

    text: str
    operands: tuple[Dims, ...]
    output: Dims
    opaque: tuple[str, ...] = ()
    indivisible: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    linear: bool = False
    additive: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        key = (self.text, self.indivisible, self.exact, self.reduced, self.linear, self.additive)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def parse(
        text: str,
        divisible: Iterable[str] = (),
        indivisible: Iterable[str] = (),
        linear: bool = False,
        *,
        exact: Iterable[str] = (),
        reduced: Iterable[str] = (),
        additive: bool = False,
    ) -> "Signature":
        """Read `operands [; opaque arguments] -> output`; with `divisible`, others are indivisible.

        Raises:
            GraphError: the text cannot be read, or a factor is listed that it does not have.
        """
        if text.count("->") != 1:
            raise GraphError(f"signature {text!r}: write 'operands -> output' with one '->'")
        left, right = text.split("->")
        tensors, _, opaque = left.partition(";")
        operands = tuple(_dims(part, text) for part in tensors.split(","))
        output = _dims(right, text)
        known = {factor for dims in operands for dim in dims for factor in dim}
        if unknown := {factor for dim in output for factor in dim} - known:
            raise GraphError(f"signature {text!r}: output factor {min(unknown)!r} is in no operand")
        may, never = tuple(divisible), tuple(indivisible)
        listed = {"divisible": may, "indivisible": never, "exact": tuple(exact), "reduced": tuple(reduced)}
        for keyword, factors in listed.items():
            if strange := set(factors) - known:
                raise GraphError(
                    f"signature {text!r}: {keyword} names {min(strange)!r}; its factors are {sorted(known)}"
                )
        if both := set(may) & set(never):
            raise GraphError(f"signature {text!r}: {min(both)!r} is both divisible and indivisible")
        return Signature(
            " ".join(text.split()),
            operands,
            output,
            tuple(name.strip() for name in opaque.split(",") if name.strip()),
            tuple(sorted(known - set(may))) if may else never,
            listed["exact"],
            listed["reduced"],
            linear or additive,
            additive,
        )

    @property
    def factors(self) -> frozenset[str]:
        """All factors of the operands."""
        return frozenset(factor for dims in self.operands for dim in dims for factor in dim)

    def factor_dim(self, operand: int, factor: str) -> int | None:
        """The dim of an operand that contains `factor`, or None; operand -1 is the output."""
        dims = self.output if operand < 0 else self.operands[operand]
        return next((place for place, factors in enumerate(dims) if factor in factors), None)

    def __str__(self) -> str:
        return f"'{self.text}'"


def addition(ndim: int) -> Signature:
    """The signature of `a + b` for tensors of `ndim` dims."""
    dims = " ".join("abcdefgh"[:ndim])
    return Signature.parse(f"{dims}, {dims} -> {dims}", additive=True)


def _dims(part: str, text: str) -> Dims:
    if _DIM.sub("", part).strip():
        raise GraphError(
            f"signature {text!r}: cannot read {part.strip()!r}; write dims as words, composites as '(g k)'"
        )
    dims = tuple(
        tuple(group.split()) if group or not plain else (plain,) for group, plain in _DIM.findall(part)
    )
    flat = [factor for dim in dims for factor in dim]
    for factor in flat:
        if flat.count(factor) > 1:
            raise GraphError(f"signature {text!r}: {part.strip()!r} has factor {factor!r} twice")
    return dims
