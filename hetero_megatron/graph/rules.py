"""Annotations of an operator's output and its operands' gradients, from its signature (paper §6.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.axes import Order, State, line_up, order_of
from hetero_megatron.graph.nodes import Sizes
from hetero_megatron.graph.signature import Signature


@dataclass(frozen=True, slots=True)
class Derived:
    """The output's annotation, and per operand that of its gradient as the operator produces it."""

    output: Annotation
    gradients: tuple[Annotation, ...]


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier or one subgroup: orders of output and gradients, and the parts each factor is cut into."""

    output: Order
    gradients: tuple[Order, ...]
    cut: tuple[tuple[str, int], ...]


def derive(signature: Signature, sizes: Sizes, operands: Sequence[Annotation]) -> Derived:
    """Apply `signature` to annotated operands: the top tier first, then every subgroup on its own.

    Along one axis of devices: operands that have the split factor must all be split on it, the others whole.
    An output that has it is Split, else Partial; an operand that has it gets a Split gradient, else Partial.

    Raises:
        GraphError: device groups differ, operands disagree, or Partial meets an operator that is not linear.
    """
    first = operands[0]
    for place, other in enumerate(operands):
        if other.groups is not first.groups and other.groups != first.groups:
            raise GraphError(
                f"operand {place} lives on other device groups than operand 0: a Reshard is missing before it"
            )
    numbers = {factor: size for factor, size in sizes if isinstance(size, int)}
    hsize = first.hsize
    top = _Tier((), ((),) * len(operands), ())
    if hsize > 1:
        try:
            arriving = frozenset(factor for factor, size in sizes if not isinstance(size, int))
            rule = _across(signature, arriving)
            top = _tier(rule, tuple(numbers.items()), tuple(((o.hdim, hsize),) for o in operands))
        except GraphError as error:
            raise GraphError(f"hdim {tuple(o.hdim for o in operands)}: {error}") from None
        if len(top.output) != 1 or any(len(order) != 1 for order in top.gradients):
            raise GraphError(f"HSize {hsize} would cut two factors of rule {signature}; hdim can cut one")
    for factor, parts in top.cut:
        if factor in numbers:
            numbers[factor] //= parts
    left = tuple(numbers.items())
    tiers = [
        _tier(signature, left, tuple(operand.states[subgroup].order for operand in operands))
        for subgroup in range(hsize)
    ]

    def union(hdim: int, orders: Sequence[Order]) -> Annotation:
        return Annotation(first.groups, tuple(_states(order) for order in orders), hdim)

    return Derived(
        union(_hdim(top.output), [tier.output for tier in tiers]),
        tuple(
            union(_hdim(top.gradients[place]), [tier.gradients[place] for tier in tiers])
            for place in range(len(operands))
        ),
    )


@lru_cache(maxsize=256)
def _across(signature: Signature, arriving: frozenset[str]) -> Signature:
    """The rule for the top tier: tokens that must stay whole may differ there, every subgroup has its own."""
    return replace(signature, indivisible=tuple(f for f in signature.indivisible if f not in arriving))


def _hdim(order: Order) -> int:
    return order[0][0] if order else DUPLICATE


@lru_cache(maxsize=4096)
def _states(order: Order) -> DistributedStates:
    return DistributedStates(order)


@lru_cache(maxsize=4096)
def _tier(signature: Signature, sizes: tuple[tuple[str, int], ...], orders: tuple[Order, ...]) -> _Tier:
    numbers = dict(sizes)
    axes = line_up(signature, numbers, orders)
    output: list[State] = []
    gradients: list[list[State]] = [[] for _ in orders]
    cut: dict[str, int] = {}
    for at, parts in enumerate(axes.parts):
        states = tuple(operand[at] for operand in axes.operands)
        result, back = _axis(signature, states, parts)
        output.append(result)
        for place, state in enumerate(back):
            gradients[place].append(state)
        for factor in {state for state in states if isinstance(state, str)}:
            cut[factor] = cut.get(factor, 1) * parts
    _check_composite(signature, numbers, cut)
    return _Tier(
        order_of(axes.parts, output, signature.output),
        tuple(
            order_of(axes.parts, states, signature.operands[place]) for place, states in enumerate(gradients)
        ),
        tuple(cut.items()),
    )


def _axis(signature: Signature, states: tuple[State, ...], parts: int) -> tuple[State, Sequence[State]]:
    """The rule along one axis: the output's state and the gradients' states."""
    if PARTIAL in states:
        return _partial(signature, states)
    factors = sorted({state for state in states if isinstance(state, str)})
    if not factors:
        return DUPLICATE, [DUPLICATE] * len(states)
    if len(factors) > 1:
        raise GraphError(f"operands are split on different factors {factors} along the same {parts} devices")
    factor = factors[0]
    has = [signature.factor_dim(place, factor) is not None for place in range(len(states))]
    for place, state in enumerate(states):
        if has[place] and state != factor:
            split = states.index(factor)
            raise GraphError(
                f"operands disagree on factor {factor!r}: operand {split} is split into {parts}, "
                f"operand {place} is whole; split both or neither"
            )
    if factor in signature.reduced:
        return DUPLICATE, [factor if own else DUPLICATE for own in has]
    output = factor if signature.factor_dim(-1, factor) is not None else PARTIAL
    return output, [factor if own else PARTIAL for own in has]


def _partial(signature: Signature, states: tuple[State, ...]) -> tuple[State, Sequence[State]]:
    partial = [place for place, state in enumerate(states) if state == PARTIAL]
    if not signature.linear:
        raise GraphError(
            f"operand {partial[0]} is Partial, and rule {signature} is not linear: reduce it first"
        )
    if signature.additive:
        if len(partial) < len(states):
            whole = next(place for place, state in enumerate(states) if state != PARTIAL)
            raise GraphError(
                f"operand {partial[0]} of a sum is Partial, operand {whole} is not and would be added "
                "several times: reduce the Partial one first"
            )
        return PARTIAL, [DUPLICATE] * len(states)
    if len(partial) > 1 or any(state not in (PARTIAL, DUPLICATE) for state in states):
        raise GraphError(
            f"operand {partial[0]} is Partial, so the others must be whole along its devices: reduce it first"
        )
    return PARTIAL, [DUPLICATE if state == PARTIAL else PARTIAL for state in states]


def _check_composite(signature: Signature, sizes: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """A minor factor of an output dim may be cut only where all major ones are cut to single pieces."""
    for factors in signature.output:
        for place, factor in enumerate(factors):
            major = next((f for f in factors[:place] if sizes.get(f) != cut.get(f, 1)), None)
            if cut.get(factor, 1) > 1 and major is not None:
                raise GraphError(
                    f"output dim '({' '.join(factors)})' is cut on {factor!r}, but {major!r} is not cut up"
                )
