"""Factor sizes follow from operand shapes."""

import pytest

from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Signature, Symbol
from hetero_megatron.graph.shapes import infer_shape

T = Symbol("T")
ATTENTION = Signature.parse("t (g r k), t (g k), t (g k) -> t (g r k)")


def test_the_head_size_gives_both_head_counts() -> None:
    sizes, output = infer_shape(ATTENTION, [(T, 32), (T, 8), (T, 8)], {"k": 4})
    assert dict(sizes) == {"g": 2, "k": 4, "r": 4, "t": T}
    assert output == (T, 32)


def test_without_the_head_size_only_the_widths_are_known() -> None:
    sizes, output = infer_shape(ATTENTION, [(T, 32), (T, 8), (T, 8)], {})
    assert dict(sizes) == {"t": T}
    assert output == (T, 32)


def test_a_new_composite_dim_is_the_product() -> None:
    assert infer_shape(Signature.parse("a b -> (a b)"), [(3, 4)], {})[1] == (12,)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("t i, o i -> t o", [(T, 6656), (32, 4096)], "operands disagree on 'i'.*: 6656 and 4096"),
        ("t i, o i -> t o", [(T, 6656), (32,)], "operand 1 has 1 dims, rule 't i, o i -> t o' wants 2"),
        ("t (g k), k -> t", [(T, 10), (4,)], "operands disagree|width 10 of '\\(g k\\)'.* does not fit k 4"),
        ("t (g k) -> (t k)", [(T, 8)], "factor 't' has no known size, so '\\(t k\\)' has none"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        infer_shape(Signature.parse(text), shapes, {})


def test_a_width_that_is_no_whole_number_of_heads_is_refused() -> None:
    with pytest.raises(GraphError, match=r"width 10 of '\(g k\)' .* does not fit k 4"):
        infer_shape(ATTENTION, [(T, 32), (T, 10), (T, 10)], {"k": 4})
