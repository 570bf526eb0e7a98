"""A graph refuses names that do not add up."""

import pytest

from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Graph, Kind, Node

LEAF = Node("x", Kind.LEAF, role="input")


def test_a_node_must_come_after_its_inputs() -> None:
    with pytest.raises(GraphError, match="r: input 'y' is not made before it is used"):
        Graph((LEAF, Node("r", Kind.RESHARD, ("y",))), "r")


def test_names_are_unique() -> None:
    with pytest.raises(GraphError, match="two nodes are called 'x'"):
        Graph((LEAF, LEAF), "x")


def test_the_output_is_a_node() -> None:
    with pytest.raises(GraphError, match="the output 'loss' is not a node of the graph"):
        Graph((LEAF,), "loss")
