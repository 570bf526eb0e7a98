"""A part of a tensor in exact fractions, without knowing the tensor's shape (paper §4, §5.3)."""

from dataclasses import dataclass
from fractions import Fraction

from hetero_megatron.errors import AnnotationError

Bounds = tuple[tuple[int, int], ...]
_WHOLE = (Fraction(0), Fraction(1))


@dataclass(frozen=True, slots=True)
class Region:
    """A box: for every cut dim the fractions [lo, hi); dims that are not listed are whole.

    >>> Region.of({0: (Fraction(1, 2), Fraction(1))}).bounds((97, 32))
    ((49, 97), (0, 32))
    """

    cuts: tuple[tuple[int, Fraction, Fraction], ...] = ()

    @staticmethod
    def of(cuts: dict[int, tuple[Fraction, Fraction]]) -> "Region":
        """The region with these [lo, hi) per dim; whole dims are left out, so equal regions compare equal."""
        for dim, (lo, hi) in cuts.items():
            if dim < 0 or not 0 <= lo < hi <= 1:
                raise AnnotationError(f"region of dim {dim}: [{lo}, {hi}) is not a part of [0, 1)")
        return Region(tuple((dim, *cuts[dim]) for dim in sorted(cuts) if cuts[dim] != _WHOLE))

    def span(self, dim: int) -> tuple[Fraction, Fraction]:
        """[lo, hi) along `dim`."""
        for cut_dim, lo, hi in self.cuts:
            if cut_dim == dim:
                return lo, hi
        return Fraction(0), Fraction(1)

    def cut(self, dim: int, index: int, parts: int) -> "Region":
        """The `index`-th of `parts` equal pieces of this region along `dim`."""
        lo, hi = self.span(dim)
        step = (hi - lo) / parts
        return self.with_span(dim, lo + step * index, lo + step * (index + 1))

    def with_span(self, dim: int, lo: Fraction, hi: Fraction) -> "Region":
        """This region with [lo, hi) along `dim` instead."""
        spans = {d: (a, b) for d, a, b in self.cuts}
        spans[dim] = (lo, hi)
        return Region.of(spans)

    def intersect(self, other: "Region") -> "Region | None":
        """What both regions cover, or None."""
        spans = {d: (lo, hi) for d, lo, hi in self.cuts}
        for dim, lo, hi in other.cuts:
            own_lo, own_hi = spans.get(dim, (Fraction(0), Fraction(1)))
            lo, hi = max(lo, own_lo), min(hi, own_hi)
            if lo >= hi:
                return None
            spans[dim] = (lo, hi)
        return Region.of(spans)

    def contains(self, other: "Region") -> bool:
        """Whether `other` lies wholly inside this region."""
        return all(lo <= other.span(dim)[0] and other.span(dim)[1] <= hi for dim, lo, hi in self.cuts)

    def volume(self) -> Fraction:
        """Share of the whole tensor that the region covers."""
        share = Fraction(1)
        for _, lo, hi in self.cuts:
            share *= hi - lo
        return share

    def bounds(self, shape: tuple[int, ...]) -> Bounds:
        """Integer [lo, hi) per dim in a tensor of `shape`, global coordinates.

        Edges round up, so a dim that does not divide gives shards of unequal (even empty) size that still
        tile the tensor exactly, whatever mixture of degrees cuts it.
        """
        spans = {dim: (lo, hi) for dim, lo, hi in self.cuts}
        if spans and max(spans) >= len(shape):
            raise AnnotationError(
                f"region {self} cuts dim {max(spans)}, but shape {shape} has {len(shape)} dims"
            )
        return tuple(
            (_edge(spans[dim][0], size), _edge(spans[dim][1], size)) if dim in spans else (0, size)
            for dim, size in enumerate(shape)
        )

    def exact(self, shape: tuple[int, ...]) -> bool:
        """Whether every edge falls on a whole index of a tensor of `shape`."""
        return all(
            (lo * shape[dim]).denominator == 1 == (hi * shape[dim]).denominator for dim, lo, hi in self.cuts
        )

    def __str__(self) -> str:
        return (
            "[" + ", ".join(f"dim {dim}: {lo}..{hi}" for dim, lo, hi in self.cuts) + "]"
            if self.cuts
            else "[whole]"
        )


def _edge(fraction: Fraction, size: int) -> int:
    return -(-fraction.numerator * size // fraction.denominator)


FULL = Region()
