"""The fully annotated graph, and the communication that it asks for (paper §6.1, §6.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, DistributedStates
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.resolve import resolve
from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.errors import GraphError
from hetero_megatron.graph.nodes import Graph
from hetero_megatron.graph.symbols import Constraint, Shape, constraints_of, local_shape

STATE = "@state"


@dataclass(frozen=True, eq=False)
class AnnotatedGraph:
    """A graph with the annotation of every value and of every gradient.

    Attributes:
        values: by node name; opaque leaves have none.
        gradients: of parameters and of what depends on them, as produced: a parameter's and a Reshard's may
            be Partial, an operator's never is.
        edge_gradients: by (consumer, operand) the Partial gradient that must be reduced on that edge.
        states: by parameter, where its optimizer states live; its own annotation unless the plan says.
    """

    graph: Graph
    values: Mapping[str, Annotation]
    gradients: Mapping[str, Annotation]
    edge_gradients: Mapping[tuple[str, int], Annotation]
    states: Mapping[str, Annotation]

    @cached_property
    def _plans(self) -> dict[tuple[int, Annotation, Annotation], tuple[Cluster | None, CommPlan]]:
        return {}

    def resolve(self, src: Annotation, dst: Annotation, cluster: Cluster | None) -> CommPlan:
        """`comm.resolve`, once per distinct pair of this graph, without hashing a large cluster each time."""
        key = (id(cluster), src, dst)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = (cluster, resolve(src, dst, cluster))
        return found[1]

    def edge_plans(self, cluster: Cluster | None = None) -> dict[tuple[str, int], CommPlan]:
        """The reduction of every activation edge with a Partial gradient, by (consumer, operand)."""
        return {
            edge: self.resolve(gradient, without_partial(gradient), cluster)
            for edge, gradient in self.edge_gradients.items()
        }

    def pre_plans(self, cluster: Cluster | None = None) -> dict[str, CommPlan]:
        """How every parameter is made from its optimizer states' layout, at the start of a step."""
        return {name: self.resolve(state, self.values[name], cluster) for name, state in self.states.items()}

    def post_plans(self, cluster: Cluster | None = None) -> dict[str, CommPlan]:
        """How every parameter's gradient reaches its optimizer states' layout, at the end of a step."""
        return {
            name: self.resolve(self.gradients[name], state, cluster) for name, state in self.states.items()
        }

    @cached_property
    def _cut_symbols(self) -> dict[tuple[Shape, Annotation], str]:
        found: dict[tuple[Shape, Annotation], str] = {}
        for name, annotation in self.values.items():
            shape = self.graph.node(name).shape
            if not all(isinstance(dim, int) for dim in shape):
                found.setdefault((shape, annotation), name)
        return found

    def constraints(self, rank: int | None = None) -> tuple[Constraint, ...]:
        """What the sizes that arrive with the data must satisfy, for the values of one rank or for all.

        One value is named per symbol and divisor.
        """
        found: dict[tuple[str, int], Constraint] = {}
        for (shape, annotation), name in self._cut_symbols.items():
            subgroup = None if rank is None else annotation.subgroup_of(rank)
            if rank is None or subgroup is not None:
                within = range(annotation.hsize) if subgroup is None else (subgroup,)
                for constraint in constraints_of(name, shape, annotation, within):
                    found.setdefault((constraint.symbol, constraint.divisor), constraint)
        return tuple(sorted(found.values(), key=lambda each: (each.symbol, each.divisor)))

    def check(self, sizes: Mapping[str, int], rank: int | None = None) -> None:
        """Refuse sizes of symbols that this graph cannot cut.

        Raises:
            GraphError: naming the symbol, its size, the divisor and the value that is cut.
        """
        for constraint in self.constraints(rank):
            constraint.check(sizes)

    def local_shape(self, name: str, rank: int) -> Shape:
        """The shape of `rank`'s shard of a value; dims that arrive with the data stay symbols."""
        return local_shape(self.graph.node(name).shape, self.values[name], rank)


@lru_cache(maxsize=65536)
def without_partial(annotation: Annotation) -> Annotation:
    """The same layout after a reduction: Partial becomes Duplicate, on both tiers.

    Raises:
        GraphError: Partial and Duplicate stand apart in the order, so that copies would stand in two places.
    """
    if not annotation.has_partial:
        return annotation
    states = []
    for subgroup in annotation.states:
        order: list[tuple[int, int]] = []
        for dim, parts in subgroup.order:
            dim = DUPLICATE if dim == PARTIAL else dim
            if order and order[-1][0] == dim == DUPLICATE:
                order[-1] = (dim, order[-1][1] * parts)
            else:
                order.append((dim, parts))
        if sum(dim == DUPLICATE for dim, _ in order) > 1:
            raise GraphError(
                f"states {subgroup} have Partial and Duplicate apart; list them next to each other"
            )
        states.append(DistributedStates(tuple(order)))
    return annotation.replace(states, DUPLICATE if annotation.hdim == PARTIAL else annotation.hdim)
