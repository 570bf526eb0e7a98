"""The defined graph: leaves, Reshards and operators, before anything is placed (paper §6, Figure 12)."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from typing import Literal

from hetero_megatron.errors import GraphError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.graph.symbols import Dim, Shape

Role = Literal["input", "parameter", "opaque"]
Sizes = tuple[tuple[str, Dim], ...]
"""Known factor sizes, sorted by factor."""


class Kind(Enum):
    """What a node is: an annotated leaf, a change of layout, or local computation."""

    LEAF = "leaf"
    RESHARD = "reshard"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the defined graph and the operator that makes it.

    Attributes:
        inputs: names of the annotated operands, call arguments first, then parameters.
        arguments: names of all call arguments in order, opaque ones included; what generated code passes.
        shape: global shape.
        role: of a leaf; an opaque leaf has no annotation, every rank has its own.
        sizes: the factor sizes of `signature` that are known.
        module: path of the module that computes the node; '' for `+` and for leaves.
        function: 'add' for `+`, else ''.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...] = ()
    signature: Signature | None = None
    shape: Shape = ()
    role: Role | None = None
    sizes: Sizes = ()
    module: str = ""
    arguments: tuple[str, ...] = ()
    function: str = ""


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in an order in which they can be computed; `output` names the loss.

    Raises:
        GraphError: a name stands twice, or an input is not made before it is used.
    """

    nodes: tuple[Node, ...]
    output: str

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            for name in (*node.inputs, *node.arguments):
                if name not in seen:
                    raise GraphError(f"{node.name}: input {name!r} is not made before it is used")
            if node.name in seen:
                raise GraphError(f"two nodes are called {node.name!r}")
            seen.add(node.name)
        if self.output not in seen:
            raise GraphError(f"the output {self.output!r} is not a node of the graph")

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node called `name`.

        Raises:
            GraphError: there is none.
        """
        if name not in self._by_name:
            raise GraphError(f"the graph has no node {name!r}{suggest(name, tuple(self._by_name))}")
        return self._by_name[name]

    def _leaves(self, role: Role) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes if node.role == role)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the annotated inputs: tokens and targets."""
        return self._leaves("input")

    @cached_property
    def opaque(self) -> tuple[str, ...]:
        """Names of the inputs without annotation: segments."""
        return self._leaves("opaque")

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order of first use."""
        return self._leaves("parameter")

    @cached_property
    def reshards(self) -> tuple[str, ...]:
        """Names of the Reshards, in forward order."""
        return tuple(node.name for node in self.nodes if node.kind is Kind.RESHARD)

    def size(self, name: str, dim: int) -> int:
        """The size of one dim of a value.

        Raises:
            GraphError: it is a symbol, known only when data arrives.
        """
        size = self.node(name).shape[dim]
        if not isinstance(size, int):
            raise GraphError(f"dim {dim} of {name} is the symbol {size}: its size arrives with the data")
        return size

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a parameter."""
        return tuple(self.size(name, dim) for dim in range(len(self.node(name).shape)))


def suggest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` when a known name is near, else ''."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
