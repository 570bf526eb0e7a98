"""Annotations of every value and every gradient from those of leaves and Reshards (paper §6.1)."""

from collections.abc import Mapping

from hetero_megatron.annotation import Annotation
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.annotated import STATE, AnnotatedGraph, without_partial
from hetero_megatron.graph.nodes import Graph, Kind, Node, Sizes, suggest
from hetero_megatron.graph.rules import Derived, derive
from hetero_megatron.graph.signature import Signature
from hetero_megatron.graph.tied import operands_of, shared_parameters, summed_gradient

__all__ = ["AnnotatedGraph", "deduce"]

Edge = tuple[str, int]


def deduce(
    graph: Graph, plan: Mapping[str, Annotation], sizes: Mapping[str, int] | None = None
) -> AnnotatedGraph:
    """Annotate `graph`; `plan` names exactly its leaves and Reshards, and any `<parameter>@state`.

    `sizes` are the symbols that are already known; what they must divide by is checked at once. A parameter that
    several nodes use may live on more subgroups than each of them (`graph.tied`).

    Raises:
        GraphError: the plan misses or does not know a name, a rule is broken, or a size does not divide.
    """
    annotations = _checked(graph, plan)
    shared = shared_parameters(graph)
    values: dict[str, Annotation] = {}
    derived: dict[str, Derived] = {}
    known: dict[tuple[Signature, Sizes, tuple[Annotation, ...]], Derived] = {}
    for node in graph.nodes:
        if node.kind is not Kind.COMPUTE:
            if node.role != "opaque":
                values[node.name] = annotations[node.name]
            continue
        assert node.signature is not None, f"{node.name} computes without a signature"
        operands = operands_of(node, values, shared)
        key = (node.signature, node.sizes, operands)
        found = known.get(key)
        if found is None:
            found = known[key] = _derive(node, node.signature, operands)
        derived[node.name] = found
        values[node.name] = found.output
    gradients, edges = _gradients(graph, values, derived, shared)
    states = {name: annotations.get(name + STATE, annotations[name]) for name in graph.parameters}
    annotated = AnnotatedGraph(graph, values, gradients, edges, states)
    if sizes:
        for constraint in annotated.constraints():
            if constraint.symbol in sizes:
                constraint.check(sizes)
    return annotated


def _checked(graph: Graph, plan: Mapping[str, Annotation]) -> dict[str, Annotation]:
    """The plan's annotations, equal ones made one object so that comparing them later is cheap."""
    wanted = (*graph.inputs, *graph.parameters, *graph.reshards)
    shapes = {name: graph.node(name).shape for name in wanted}
    shapes |= {name + STATE: shapes[name] for name in graph.parameters}
    for name in wanted:
        if name not in plan:
            raise GraphError(
                f"the annotation plan says nothing about {name!r}, a leaf or Reshard of the graph"
            )
    one: dict[Annotation, Annotation] = {}
    found: dict[str, Annotation] = {}
    for name, annotation in plan.items():
        if name not in shapes:
            hint = suggest(name, tuple(shapes))
            raise GraphError(
                f"the annotation plan names {name!r}, which is no leaf or Reshard of the graph{hint}"
            )
        annotation = found[name] = one.setdefault(annotation, annotation)
        if annotation.has_partial and graph.node(name.removesuffix(STATE)).role is not None:
            raise GraphError(
                f"{name} is a leaf, whose values are whole, but its annotation {annotation} is Partial"
            )
        highest = max((annotation.hdim, *(dim for states in annotation.states for dim, _ in states.order)))
        if highest >= len(shapes[name]):
            raise GraphError(
                f"{name} has {len(shapes[name])} dims, but its annotation {annotation} cuts dim {highest}"
            )
    return found


def _derive(node: Node, signature: Signature, operands: tuple[Annotation, ...]) -> Derived:
    try:
        return derive(signature, node.sizes, operands)
    except GraphError as error:
        listed = "; ".join(
            f"operand {place} {name} is {annotation}"
            for place, (name, annotation) in enumerate(zip(node.inputs, operands, strict=True))
        )
        advice = "annotate the leaf or put a Reshard before it"
        raise GraphError(f"{node.name}: {error} (rule {signature}; {listed}; {advice})") from None


def _gradients(
    graph: Graph,
    values: Mapping[str, Annotation],
    derived: Mapping[str, Derived],
    shared: frozenset[str],
) -> tuple[dict[str, Annotation], dict[Edge, Annotation]]:
    """Gradients by value, and the edges on which a Partial one must be reduced.

    A Reshard or parameter takes a Partial gradient as it is, if all its consumers agree: its own
    communication reduces it. Everything else, and every disagreement, is reduced on the edges concerned.
    """
    trained: set[str] = set()
    consumers: dict[str, list[tuple[Edge, Annotation]]] = {}
    for node in graph.nodes:
        if node.role == "parameter" or any(name in trained for name in node.inputs):
            trained.add(node.name)
        for place, name in enumerate(node.inputs):
            if name in trained:
                back = (
                    derived[node.name].gradients[place]
                    if node.kind is Kind.COMPUTE
                    else without_partial(values[name])
                )
                consumers.setdefault(name, []).append(((node.name, place), back))
    gradients: dict[str, Annotation] = {}
    edges: dict[Edge, Annotation] = {}
    for node in graph.nodes:
        if node.name not in trained:
            continue
        found = consumers.get(node.name, [])
        if node.name in shared:
            produced = [(consumer, back) for (consumer, _), back in found]
            gradients[node.name] = summed_gradient(node.name, values[node.name], produced)
            continue
        first = found[0][1] if found else without_partial(values[node.name])
        agree = all(back is first or back == first for _, back in found)
        if agree and (node.kind is not Kind.COMPUTE or not first.has_partial):
            gradients[node.name] = first
            continue
        gradients[node.name] = without_partial(values[node.name])
        edges.update({edge: back for edge, back in found if back.has_partial})
    return gradients, edges
