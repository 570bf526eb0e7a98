"""Factor sizes and output shapes from operand shapes (paper A.2)."""

from collections.abc import Mapping, Sequence

from hetero_megatron.errors import GraphError
from hetero_megatron.graph.nodes import Sizes
from hetero_megatron.graph.signature import Signature
from hetero_megatron.graph.symbols import Dim, Shape


def infer_shape(
    signature: Signature, shapes: Sequence[Shape], given: Mapping[str, int]
) -> tuple[Sizes, Shape]:
    """The factor sizes that follow from the operands' shapes and from `given`, and the output's shape.

    A composite dim gives its last unknown factor: `(g k)` of width 256 with k = 64 says g = 4.

    Raises:
        GraphError: an operand has another number of dims, or two operands disagree on a factor.
    """
    sizes: dict[str, Dim] = dict(given)
    widths: dict[tuple[str, ...], Dim] = {}
    for place, (dims, shape) in enumerate(zip(signature.operands, shapes, strict=True)):
        if len(dims) != len(shape):
            raise GraphError(f"operand {place} has {len(shape)} dims, rule {signature} wants {len(dims)}")
        for factors, size in zip(dims, shape, strict=True):
            before = widths.setdefault(factors, size)
            if len(factors) == 1:
                before = sizes.setdefault(factors[0], size)
            if before != size:
                label = " ".join(factors)
                raise GraphError(f"operands disagree on {label!r} of rule {signature}: {before} and {size}")
    for factors, width in sorted(widths.items(), key=lambda item: len(item[0])):
        _solve(signature, factors, width, sizes)
    output = tuple(
        sizes[dim[0]] if len(dim) == 1 else _width(signature, dim, widths, sizes) for dim in signature.output
    )
    return tuple(sorted(sizes.items())), output


def _solve(signature: Signature, factors: tuple[str, ...], width: Dim, sizes: dict[str, Dim]) -> None:
    product = 1
    for factor in factors:
        size = sizes.get(factor, 1)
        product *= size if isinstance(size, int) else 1
    missing = [factor for factor in factors if factor not in sizes]
    if len(missing) > 1 or not isinstance(width, int):
        return
    if width % product or (not missing and width != product):
        known = ", ".join(f"{factor} {sizes[factor]}" for factor in factors if factor in sizes)
        raise GraphError(f"width {width} of '({' '.join(factors)})' in rule {signature} does not fit {known}")
    if missing:
        sizes[missing[0]] = width // product


def _width(
    signature: Signature,
    dim: tuple[str, ...],
    widths: Mapping[tuple[str, ...], Dim],
    sizes: Mapping[str, Dim],
) -> Dim:
    if dim in widths:
        return widths[dim]
    product = 1
    for factor in dim:
        size = sizes.get(factor)
        if not isinstance(size, int):
            raise GraphError(
                f"rule {signature}: factor {factor!r} has no known size, so '({' '.join(dim)})' has none"
            )
        product *= size
    return product
