"""Figure 13: how the annotation of a 3D x 2D Dot follows from those of its operands."""

import itertools

import pytest

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Signature, derive

DOT = Signature.parse("a b c, c d -> a b d", linear=True)

SPLITS = list(itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2)))
# HDim of (X, W) -> of Y; every other pair is an error.
HDIMS = {(0, -1): 0, (1, -1): 1, (2, 0): -2, (-1, 1): 2, (-1, -1): -1}


@pytest.mark.parametrize(("a", "b", "c", "rest"), SPLITS)
def test_rows_and_contracted_dim_split(a: int, b: int, c: int, rest: int) -> None:
    """X splits (a, b, c), W splits (c, 1): Y splits (a, b, 1), is Partial c and Duplicate n / (a b c)."""
    ranks = range(a * b * c * rest)
    # Copies first: X's and W's copies then stand together in their orders.
    x = Annotation.on(ranks, {DUPLICATE: rest, 0: a, 1: b, 2: c})
    w = Annotation.on(ranks, {DUPLICATE: rest * a * b, 0: c})
    y = derive(DOT, (), (x, w)).output.states[0]
    assert [y.parts(dim) for dim in (0, 1, 2, PARTIAL, DUPLICATE)] == [a, b, 1, c, rest]


@pytest.mark.parametrize(("a", "b", "c", "d"), SPLITS)
def test_all_dims_split(a: int, b: int, c: int, d: int) -> None:
    """X splits (a, b, c), W splits (c, d): Y splits (a, b, d) and is Partial c."""
    ranks = range(a * b * c * d)
    x = Annotation.on(ranks, {0: a, 1: b, 2: c, DUPLICATE: d})
    w = Annotation.on(ranks, {DUPLICATE: a * b, 0: c, 1: d})
    y = derive(DOT, (), (x, w)).output.states[0]
    assert [y.parts(dim) for dim in (0, 1, 2, PARTIAL, DUPLICATE)] == [a, b, d, c, 1]


def test_the_contracted_dim_must_be_split_alike() -> None:
    x, w = Annotation.on(range(2), {2: 2}), Annotation.on(range(2), {DUPLICATE: 2})
    with pytest.raises(GraphError, match="operands disagree on factor 'c': operand 0 is split into 2"):
        derive(DOT, (), (x, w))


@pytest.mark.parametrize(("x_hdim", "w_hdim"), list(itertools.product((-1, 0, 1, 2), (-1, 0, 1))))
def test_hdim(x_hdim: int, w_hdim: int) -> None:
    groups = (DeviceGroup((0, 1)), DeviceGroup((2,)))
    whole = (DistributedStates(((DUPLICATE, 2),)), DistributedStates())
    operands = (Annotation(groups, whole, x_hdim), Annotation(groups, whole, w_hdim))
    if (x_hdim, w_hdim) in HDIMS:
        assert derive(DOT, (), operands).output == Annotation(groups, whole, HDIMS[x_hdim, w_hdim])
    else:
        with pytest.raises(GraphError, match=rf"hdim \({x_hdim}, {w_hdim}\): operands "):
            derive(DOT, (), operands)
