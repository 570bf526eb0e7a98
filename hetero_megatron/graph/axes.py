"""Common device axes of several operands' states, and the factor each operand cuts along each (paper §6.1).

`{1: 4}` beside `{1: 2, -1: 2}` makes two axes of two devices: the first operand cuts dim 1 along both, the
second along the slower one only. HDim is one more axis, slower than all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from hetero_megatron.annotation import DUPLICATE, PARTIAL, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.signature import Dims, Signature

Order = tuple[tuple[int, int], ...]
State = str | int
"""What a tensor is along one axis: split on a factor, or DUPLICATE, or PARTIAL."""

FACTOR_NAMES = {
    "t": "tokens",
    "g": "kv heads (num_query_groups)",
    "r": "query heads per kv head",
    "n": "heads",
    "k": "head size",
    "h": "hidden features",
    "f": "ffn features",
    "v": "vocabulary rows",
}


@dataclass(frozen=True, slots=True)
class Axes:
    """Parts per axis, slowest first, and per operand its state along each axis."""

    parts: tuple[int, ...]
    operands: tuple[tuple[State, ...], ...]


def line_up(signature: Signature, sizes: Mapping[str, int], orders: Sequence[Order]) -> Axes:
    """Refine the operands' states, all over the same devices, to common axes.

    A composite dim is cut major factor first. `sizes` are what is left to cut of each factor.

    Raises:
        GraphError: the states do not line up, or a factor cannot be cut like that.
    """
    edges = {1}
    for order in orders:
        edge = 1
        for _, parts in order:
            edge *= parts
            edges.add(edge)
    while True:
        axes = _between(edges, orders)
        states: list[tuple[State, ...]] = []
        for place, order in enumerate(orders):
            found = _factors(signature.operands[place], signature, sizes, order, axes, f"operand {place}")
            if isinstance(found, int):
                edges.add(found)
                break
            states.append(found)
        else:
            return Axes(axes, tuple(states))


def _between(edges: set[int], orders: Sequence[Order]) -> tuple[int, ...]:
    cuts = sorted(edges)
    for slow, fast in pairwise(cuts):
        if fast % slow:
            layouts = " and ".join(str(DistributedStates(order)) for order in orders)
            raise GraphError(f"states {layouts} have no common axes: {slow} does not divide {fast}")
    return tuple(fast // slow for slow, fast in pairwise(cuts))


def _factors(
    dims: Dims,
    signature: Signature,
    sizes: Mapping[str, int],
    order: Order,
    axes: tuple[int, ...],
    operand: str,
) -> tuple[State, ...] | int:
    """Along each axis the factor that this operand cuts; or one more edge where an axis spans two factors."""
    states: list[State] = []
    at, edge = 0, 1
    for dim, parts in order:
        if dim >= len(dims):
            raise GraphError(
                f"{operand} has {len(dims)} dims by rule {signature}, but its states cut dim {dim}"
            )
        left = list(dims[dim]) if dim >= 0 else []
        room = sizes.get(left[0]) if left else None
        end = edge * parts
        while edge < end:
            axis = axes[at]
            if dim < 0:
                states.append(dim)
            else:
                while room == 1 and len(left) > 1:
                    left.pop(0)
                    room = sizes.get(left[0])
                factor = left[0]
                if factor in signature.indivisible:
                    raise _refusal(signature, sizes, dims[dim], parts)
                if room is not None and (len(dims[dim]) > 1 or factor in signature.exact) and room % axis:
                    # An axis that runs past this factor's end is cut there; the rest goes to the next factor.
                    if len(left) > 1 and room > 1 and axis % room == 0:
                        return edge * room
                    raise _refusal(signature, sizes, dims[dim], parts)
                room = None if room is None else room // axis
                states.append(factor)
            edge *= axis
            at += 1
    return tuple(states)


def _refusal(
    signature: Signature, sizes: Mapping[str, int], factors: tuple[str, ...], parts: int
) -> GraphError:
    """`2 kv heads (num_query_groups) cannot be split over TP 4 ...`."""
    may = [factor for factor in factors if factor not in signature.indivisible]
    if not may:
        name = FACTOR_NAMES.get(factors[-1], f"factor {factors[-1]!r}")
        return GraphError(f"{name} must stay whole by rule {signature}, but the states cut them into {parts}")
    name = "heads" if len(may) > 1 else FACTOR_NAMES.get(may[0], f"of factor {may[0]!r}")
    known = [sizes[factor] for factor in may if factor in sizes]
    if len(known) < len(may):
        return GraphError(f"{name} of unknown size cannot be split over TP {parts} by rule {signature}")
    fits = gcd(prod(known), parts)
    advice = f"the parts must divide {prod(known)}"
    if fits > 1:
        advice = f"split them over {fits} and hold {parts // fits} copies"
    return GraphError(f"{prod(known)} {name} cannot be split over TP {parts}: {advice}")


def order_of(axes: tuple[int, ...], states: Sequence[State], dims: Dims) -> Order:
    """The spelling of a tensor's states along `axes`, equal neighbours joined.

    Raises:
        GraphError: one dim would have to stand in two places of the order.
    """
    order: list[tuple[int, int]] = []
    for parts, state in zip(axes, states, strict=True):
        dim = (
            state if isinstance(state, int) else next(p for p, factors in enumerate(dims) if state in factors)
        )
        if order and order[-1][0] == dim:
            order[-1] = (dim, order[-1][1] * parts)
        else:
            order.append((dim, parts))
    listed = [dim for dim, _ in order]
    for dim in listed:
        if listed.count(dim) > 1:
            name = {DUPLICATE: "Duplicate", PARTIAL: "Partial"}.get(dim, f"dim {dim}")
            raise GraphError(
                f"the result is {name} along two separate axes of {order}, which no states can say"
            )
    return tuple(order)
