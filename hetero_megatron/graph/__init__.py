"""From a model to what every rank does (paper §6); `graph.trace` needs torch and is imported apart."""

from hetero_megatron.graph.annotated import AnnotatedGraph, without_partial
from hetero_megatron.graph.deduce import deduce
from hetero_megatron.graph.nodes import Graph, Kind, Node
from hetero_megatron.graph.rules import Derived, derive
from hetero_megatron.graph.signature import Signature
from hetero_megatron.graph.specialize import (
    BoundEdge,
    BoundReshard,
    Chunk,
    ExecutableGraph,
    boundary_reshards,
    reshard_plans,
    specialize,
)
from hetero_megatron.graph.symbols import Constraint, Symbol

__all__ = [
    "AnnotatedGraph",
    "BoundEdge",
    "BoundReshard",
    "Chunk",
    "Constraint",
    "Derived",
    "ExecutableGraph",
    "Graph",
    "Kind",
    "Node",
    "Signature",
    "Symbol",
    "boundary_reshards",
    "deduce",
    "derive",
    "reshard_plans",
    "specialize",
    "without_partial",
]
