"""One rank's executable graph: its operators, and its Reshards bound to communication (paper §6.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.steps import CommPlan, Transfer
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.annotated import AnnotatedGraph, without_partial
from hetero_megatron.graph.nodes import Kind, Node
from hetero_megatron.graph.symbols import Constraint


@dataclass(frozen=True, slots=True)
class BoundReshard:
    """A Reshard with its communication; None where there is nothing to do."""

    name: str
    forward: CommPlan | None
    backward: CommPlan | None


@dataclass(frozen=True, slots=True)
class BoundEdge:
    """The reduction of one operand's gradient on its way back from `consumer`."""

    consumer: str
    operand: int
    backward: CommPlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a rank computes between receiving and sending.

    Attributes:
        inputs: the boundary Reshards whose result is received before.
        nodes: operators, and Reshards that stay inside the group, in order.
        outputs: the boundary Reshards whose input is sent after; none in a chunk that ends with the loss.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutableGraph:
    """Everything that one rank does: parameters from states, chunks, gradients to states.

    Attributes:
        pre: per local parameter, from the layout of its states; named by parameter.
        chunks: in forward order.
        post: per local parameter, its gradient to the layout of its states; named by parameter.
        reshards: the local Reshards in forward order, boundary ones included.
        edges: the local edges on which a Partial gradient is reduced.
        constraints: what the token counts must divide by for the values that this rank holds.
    """

    rank: int
    pre: tuple[BoundReshard, ...]
    chunks: tuple[Chunk, ...]
    post: tuple[BoundReshard, ...]
    reshards: tuple[BoundReshard, ...]
    edges: tuple[BoundEdge, ...]
    constraints: tuple[Constraint, ...]


def reshard_plans(annotated: AnnotatedGraph, cluster: Cluster | None = None) -> tuple[BoundReshard, ...]:
    """Every Reshard in forward order with its forward and gradient communication, all ranks together."""
    return tuple(_bind(annotated, name, cluster) for name in annotated.graph.reshards)


def boundary_reshards(annotated: AnnotatedGraph, cluster: Cluster | None = None) -> tuple[CommPlan, ...]:
    """The forward communication that moves values from one group to another, in forward order."""
    plans = (bound.forward for bound in reshard_plans(annotated, cluster))
    return tuple(
        plan for plan in plans if plan is not None and any(_crosses(plan, rank) for rank in plan.ranks)
    )


def specialize(annotated: AnnotatedGraph, rank: int, cluster: Cluster | None = None) -> ExecutableGraph:
    """The part of `annotated` that holds `rank`, with every Reshard resolved.

    Raises:
        GraphError: the rank holds nothing, or a value passes between two chunks other than through a Reshard.
    """
    graph, values = annotated.graph, annotated.values
    local = {name for name, annotation in values.items() if annotation.subgroup_of(rank) is not None}
    here = [name for name in graph.reshards if name in local or graph.node(name).inputs[0] in local]
    reshards = {name: _bind(annotated, name, cluster) for name in here}
    pre, post = [], []
    for name, state in annotated.states.items():
        if name in local or state.subgroup_of(rank) is not None:
            pre.append(BoundReshard(name, _useful(annotated.resolve(state, values[name], cluster)), None))
            gradient = annotated.gradients[name]
            post.append(BoundReshard(name, _useful(annotated.resolve(gradient, state, cluster)), None))
    if not (local or pre):
        raise GraphError(f"rank {rank} holds no part of the graph")
    return ExecutableGraph(
        rank,
        tuple(pre),
        _chunks(annotated, rank, local, reshards),
        tuple(post),
        tuple(reshards.values()),
        tuple(
            BoundEdge(consumer, place, annotated.resolve(gradient, without_partial(gradient), cluster))
            for (consumer, place), gradient in annotated.edge_gradients.items()
            if consumer in local
        ),
        annotated.constraints(rank),
    )


def _useful(plan: CommPlan) -> CommPlan | None:
    return None if plan.label == "Identity" else plan


def _bind(annotated: AnnotatedGraph, name: str, cluster: Cluster | None) -> BoundReshard:
    values, source = annotated.values, annotated.graph.node(name).inputs[0]
    backward = None
    if name in annotated.gradients:
        plan = annotated.resolve(annotated.gradients[name], without_partial(values[source]), cluster)
        backward = _useful(plan)
    return BoundReshard(name, _useful(annotated.resolve(values[source], values[name], cluster)), backward)


def _crosses(plan: CommPlan, rank: int) -> bool:
    """Whether `rank` takes part in `plan` as a pipeline stage that sends to, or receives from, another one.

    Its group must change, and not by collectives alone: those join ranks on one stage.
    """
    before, after = plan.src.subgroup_of(rank), plan.dst.subgroup_of(rank)
    if before is None or after is None:
        return before is not None or after is not None
    if set(plan.src.groups[before]) == set(plan.dst.groups[after]):
        return False
    return any(isinstance(step, Transfer) for stage in plan.for_rank(rank) for step in stage.steps)


def _chunks(
    annotated: AnnotatedGraph, rank: int, local: set[str], reshards: dict[str, BoundReshard]
) -> tuple[Chunk, ...]:
    """Cut the local nodes where this rank must send before it can go on.

    A value's depth is how many of this rank's sends it depends on, whichever ranks compute it.
    """
    depth: dict[str, int] = {}
    inputs: dict[int, list[str]] = {}
    nodes: dict[int, list[Node]] = {}
    outputs: dict[int, list[str]] = {}
    for node in annotated.graph.nodes:
        at = max((depth[name] for name in node.inputs), default=0)
        bound = reshards.get(node.name)
        crossing = bound is not None and bound.forward is not None and _crosses(bound.forward, rank)
        if crossing:
            if node.inputs[0] in local:
                outputs.setdefault(at, []).append(node.name)
                at += 1
            if node.name in local:
                inputs.setdefault(at, []).append(node.name)
        elif node.kind is not Kind.LEAF and node.name in local:
            _check_passed(annotated, node, at, depth)
            nodes.setdefault(at, []).append(node)
        depth[node.name] = at
    return _in_order(inputs, nodes, outputs)


def _check_passed(annotated: AnnotatedGraph, node: Node, at: int, depth: dict[str, int]) -> None:
    for name in node.inputs:
        if depth[name] != at and annotated.graph.node(name).kind is not Kind.LEAF:
            raise GraphError(
                f"{node.name} is in chunk {at}, but its operand {name} is made in chunk {depth[name]} and "
                "does not pass a Reshard on the way: put one between them"
            )


def _in_order(
    inputs: dict[int, list[str]], nodes: dict[int, list[Node]], outputs: dict[int, list[str]]
) -> tuple[Chunk, ...]:
    empty: Sequence[str] = ()
    return tuple(
        Chunk(tuple(inputs.get(at, empty)), tuple(nodes.get(at, ())), tuple(outputs.get(at, empty)))
        for at in sorted({*inputs, *nodes, *outputs})
    )
