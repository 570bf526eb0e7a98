"""Sizes that arrive with the data: halves, constraints, and their refusals (paper A.2)."""

import pytest

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Constraint, Symbol
from hetero_megatron.graph.symbols import constraints_of, local_shape

TWO_PIPELINES = Annotation(
    (DeviceGroup((0, 1)), DeviceGroup((2,))), (DistributedStates(((0, 2),)), DistributedStates()), 0
)


def test_a_split_symbol_remembers_what_it_is_a_part_of() -> None:
    half = Symbol("S").split(2)
    assert str(half) == "S/2"
    assert half.split(2) == Symbol("S", 4)
    assert half.resolve({"S": 14}) == 7


def test_a_split_symbol_without_a_whole_size_is_refused() -> None:
    with pytest.raises(GraphError, match="S is 15, but must divide by 2; pad it to 16"):
        Symbol("S").split(2).resolve({"S": 15})


def test_a_constraint_names_the_value_that_is_cut() -> None:
    Constraint("T", 4, "mlp_out").check({"T": 8})
    with pytest.raises(
        GraphError, match="T is 10, but must divide by 4: mlp_out is cut into 4 equal parts; pad it to 12"
    ):
        Constraint("T", 4, "mlp_out").check({"T": 10})


def test_a_size_that_is_not_given_is_refused() -> None:
    with pytest.raises(GraphError, match=r"no size is given for T; given: \['S'\]"):
        Constraint("T", 2).check({"S": 2})


def test_only_the_bottom_tier_asks_for_divisibility() -> None:
    shape = (Symbol("T"), 32)
    assert constraints_of("x", shape, TWO_PIPELINES, (0, 1)) == {Constraint("T", 2, "x")}
    assert constraints_of("x", shape, TWO_PIPELINES, (1,)) == set()


def test_local_shapes_keep_symbols_and_cut_numbers() -> None:
    assert local_shape((Symbol("T"), 32), TWO_PIPELINES, 1) == (Symbol("T", 2), 32)
    assert local_shape((Symbol("T"), 32), TWO_PIPELINES, 2) == (Symbol("T"), 32)
    assert local_shape((7, 32), Annotation.on((0, 1), {0: 2}), 1) == (3, 32)
