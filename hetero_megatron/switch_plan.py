"""What a switch between parallel strategies moves, and who sends it: fused BSR (paper §7, Table 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster, ranges_text
from hetero_megatron.comm import Algorithm, BsrScheme, BsrTensor, bsr_table, schedule_transfers
from hetero_megatron.comm.boxes import numel
from hetero_megatron.errors import ReshardError
from hetero_megatron.program import Program

Parameter = tuple[str, tuple[int, ...], Annotation, Annotation]
"""Name, global shape, annotation before and after the switch."""

TENSORS = ("", "@mean", "@variance")
"""What Adam keeps per parameter, as suffixes of the parameter's name."""

FP32_BYTES = 4


@dataclass(frozen=True)
class SwitchPlan:
    """The tensors of a switch in the order in which senders are chosen, the cluster, and the lost ranks."""

    tensors: tuple[BsrTensor, ...]
    cluster: Cluster
    lost: frozenset[int] = frozenset()

    @cached_property
    def _schemes(self) -> dict[Algorithm, BsrScheme]:
        return {}

    def scheme(self, algorithm: Algorithm = "fused") -> BsrScheme:
        """Copies and transfers under 'naive', 'unfused' or 'fused'; computed once."""
        if algorithm not in self._schemes:
            self._schemes[algorithm] = schedule_transfers(self.tensors, self.cluster, algorithm, self.lost)
        return self._schemes[algorithm]

    def bytes_sent(self, algorithm: Algorithm = "fused") -> dict[int, dict[str, int | Fraction]]:
        """Bytes sent by rank and link name; ranks that send nothing are absent."""
        return self.scheme(algorithm).bytes_sent(self.cluster)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The living ranks that hold something before the switch, ascending."""
        return tuple(sorted({rank for each in self.tensors for rank in each.src.ranks} - self.lost))

    @cached_property
    def unowned(self) -> tuple[str, ...]:
        """The parameters of which a living rank needs a slice that no living rank owns, in plan order."""
        found = dict.fromkeys(
            each.name.partition("@")[0] for each in self.tensors if self.lost and self._is_unowned(each)
        )
        return tuple(found)

    def _is_unowned(self, tensor: BsrTensor) -> bool:
        return any(
            self.lost.issuperset(piece.owners)
            and not self.lost.issuperset(piece.needers)
            and numel(piece.region, tensor.shape)
            for piece in bsr_table(tensor.src, tensor.dst)
        )

    def check(self) -> None:
        """Refuse what nobody alive could send, and receivers that are not alive.

        Raises:
            ReshardError: naming the layers and parameters, or the lost rank that would have to receive.
        """
        used = self.lost & {rank for each in self.tensors for rank in each.dst.ranks}
        if used:
            raise ReshardError(f"rank {ranges_text(used)} is lost, but the new strategy uses it")
        if self.unowned:
            raise ReshardError(
                f"{_listed(self.unowned)}: slices that only lost ranks owned (lost: {ranges_text(self.lost)}); "
                "load them from a checkpoint"
            )


def _listed(names: Sequence[str]) -> str:
    """`layers 2-3 (18 parameters), head.weight`."""
    parts = [name.split(".") for name in names]
    layered = [int(part[1]) for part in parts if part[0] == "layers"]
    rest = [name for name, part in zip(names, parts, strict=True) if part[0] != "layers"]
    if not layered:
        return ", ".join(rest)
    word = "layer" if len(set(layered)) == 1 else "layers"
    count = f"{len(layered)} parameter{'s' * (len(layered) > 1)}"
    return ", ".join([f"{word} {ranges_text(set(layered))} ({count})", *rest])


def plan_switch(
    parameters: Sequence[Parameter],
    cluster: Cluster,
    lost: frozenset[int] = frozenset(),
    bytes_per_parameter: int = 12,
    kinds: Sequence[str] = TENSORS,
) -> SwitchPlan:
    """Move every parameter with its mean and variance, a third of `bytes_per_parameter` per element each.

    Senders are chosen for the parameters in the given order, then for the means and the variances in reverse:
    what the first pass leaves uneven, the way back evens out. `cluster` includes the lost ranks. `kinds` are the
    suffixes of what is moved, if it is less than all `TENSORS`.

    >>> halves, whole = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
    >>> plan_switch([("w", (8, 4), halves, whole)], Cluster.local_cpu(2)).bytes_sent()[0]
    {'loopback': 192}
    """
    itemsize = Fraction(bytes_per_parameter, len(kinds))
    size = itemsize.numerator if itemsize.denominator == 1 else itemsize
    tensors: list[BsrTensor] = []
    for suffix in kinds:
        order = parameters if not suffix else reversed(parameters)
        tensors += [BsrTensor(name + suffix, shape, size, src, dst) for name, shape, src, dst in order]
    return SwitchPlan(tuple(tensors), cluster, lost)


def switch_between(
    before: Program,
    after: Program,
    cluster: Cluster | None = None,
    lost: frozenset[int] = frozenset(),
    moments: bool = True,
) -> SwitchPlan:
    """What a run moves between two programs of one model: FP32 master weights, and Adam's moments if it has any.

    Layouts are those of the optimizer states (`@state`). `cluster` has all ranks of both programs, the lost ones too;
    by default it is that of `before` with what only `after` knows.

    Raises:
        ReshardError: the programs are of different models; a slice has no living owner; a lost rank is used again.
    """
    shapes = _shapes(before)
    if shapes != _shapes(after):
        differ = sorted(set(shapes.items()) ^ set(_shapes(after).items()))
        raise ReshardError(
            f"the programs are of different models: they differ in {differ[0][0]}; a switch changes the strategy alone"
        )
    if cluster is None:
        known = set(before.cluster.ranks)
        cluster = Cluster(
            before.cluster.devices + tuple(d for d in after.cluster.devices if d.rank not in known),
            tuple(dict.fromkeys(before.cluster.kinds + after.cluster.kinds)),
            before.cluster.inter_node,
        )
    parameters = parameters_between(shapes, before.annotated.states, after.annotated.states)
    kinds = TENSORS if moments else TENSORS[:1]
    plan = plan_switch(parameters, cluster, lost, FP32_BYTES * len(kinds), kinds)
    plan.check()
    return plan


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    graph = program.annotated.graph
    return {name: graph.parameter_shape(name) for name in graph.parameters}


def parameters_between(
    shapes: Mapping[str, tuple[int, ...]], before: Mapping[str, Annotation], after: Mapping[str, Annotation]
) -> tuple[Parameter, ...]:
    """The parameters named by `shapes`, in that order, with their annotations in two plans.

    Raises:
        ReshardError: a plan does not mention a parameter.
    """
    for which, plan in (("before", before), ("after", after)):
        for name in shapes:
            if name not in plan:
                raise ReshardError(f"parameter {name!r} has no annotation in the plan {which} the switch")
    return tuple((name, shape, before[name], after[name]) for name, shape in shapes.items())
