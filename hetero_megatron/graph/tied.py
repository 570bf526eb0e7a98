"""A tied leaf: one parameter whose consumers run on different subgroups (paper §4.2, §6.1).

Every COMPUTE node shares one DG Union with its inputs (DESIGN decision 1), with one exception. A parameter that
several nodes use, such as the embedding's weight that is the head's too, lives on the subgroups of all of them.
For each node it is restricted to the subgroups of the node's other operands. Its gradient is on the whole union
again: inside a subgroup as the nodes there produce it (autograd adds those of one rank), and Partial across
subgroups, because each holds only its own nodes' addends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.nodes import Graph, Node


def shared_parameters(graph: Graph) -> frozenset[str]:
    """The parameters that are an operand more than once."""
    uses = Counter(name for node in graph.nodes for name in node.inputs)
    return frozenset(name for name in graph.parameters if uses[name] > 1)


def operands_of(
    node: Node, values: Mapping[str, Annotation], shared: frozenset[str]
) -> tuple[Annotation, ...]:
    """The operands' annotations, a shared parameter's restricted to where the first other operand lives.

    Raises:
        GraphError: the parameter lacks a subgroup of the other operand, or is cut across its subgroups.
    """
    other = (
        None if shared.isdisjoint(node.inputs) else next((n for n in node.inputs if n not in shared), None)
    )
    if other is None:
        return tuple(values[name] for name in node.inputs)
    return tuple(
        _restricted(node, name, values[name], other, values[other]) if name in shared else values[name]
        for name in node.inputs
    )


def _restricted(node: Node, name: str, leaf: Annotation, other: str, wanted: Annotation) -> Annotation:
    if leaf.groups == wanted.groups:
        return leaf
    states = dict(zip(leaf.groups, leaf.states, strict=True))
    for group in wanted.groups:
        if group not in states:
            raise GraphError(
                f"{node.name}: operand {other} is {wanted}, but the shared parameter {name} is {leaf} and has "
                f"no subgroup {group}; a parameter lives on the subgroups of every node that uses it"
            )
    if leaf.hdim != DUPLICATE:
        raise GraphError(
            f"{node.name}: the shared parameter {name} is {leaf}, cut across its subgroups, of which "
            f"{node.name} has only some; with hdim {DUPLICATE} each subgroup holds it whole"
        )
    return Annotation(wanted.groups, tuple(states[group] for group in wanted.groups))


def summed_gradient(name: str, leaf: Annotation, produced: Sequence[tuple[str, Annotation]]) -> Annotation:
    """The gradient of a shared parameter from what each (consumer, gradient) produces on its own subgroups.

    Raises:
        GraphError: a subgroup has no consumer, consumers in one subgroup produce different states, or one
            repeats the same gradient on several subgroups where another one does not run.
    """
    states = []
    for group in leaf.groups:
        here = [
            (consumer, back.states[back.groups.index(group)])
            for consumer, back in produced
            if group in back.groups
        ]
        if not here:
            consumers = ", ".join(consumer for consumer, _ in produced)
            raise GraphError(f"{name} is {leaf}, but none of its consumers ({consumers}) runs on {group}")
        (first, wanted), *others = here
        for consumer, found in others:
            if found != wanted:
                raise GraphError(
                    f"the gradient of {name} on {group} is {wanted} from {first} and {found} from {consumer}: "
                    "they cannot be added before they are reduced; annotate what both read alike"
                )
        states.append(wanted)
    hdim = PARTIAL
    if all(back.groups == leaf.groups for _, back in produced):
        hdim = produced[0][1].hdim
    for consumer, back in produced:
        if back.hsize > 1 and back.hdim != hdim:
            raise GraphError(
                f"the gradient of {name} from {consumer} is {back}: every subgroup makes all of it, and the sum "
                "over the subgroups of all consumers would count it several times"
            )
    return leaf.replace(states, hdim)
