"""What a switch between parallel strategies moves, and who sends it: fused BSR (paper §7, Table 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Algorithm, BsrScheme, BsrTensor, schedule_transfers
from hetero_megatron.errors import ReshardError

Parameter = tuple[str, tuple[int, ...], Annotation, Annotation]
"""Name, global shape, annotation before and after the switch."""

TENSORS = ("", "@mean", "@variance")
"""What Adam keeps per parameter, as suffixes of the parameter's name."""


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


def plan_switch(
    parameters: Sequence[Parameter],
    cluster: Cluster,
    lost: frozenset[int] = frozenset(),
    bytes_per_parameter: int = 12,
) -> SwitchPlan:
    """Move every parameter with its mean and variance, a third of `bytes_per_parameter` per element each.

    Senders are chosen for the parameters in the given order, then for the means and the variances in reverse:
    what the first pass leaves uneven, the way back evens out. `cluster` includes the lost ranks.

    >>> halves, whole = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
    >>> plan_switch([("w", (8, 4), halves, whole)], Cluster.local_cpu(2)).bytes_sent()[0]
    {'loopback': 192}
    """
    itemsize = Fraction(bytes_per_parameter, len(TENSORS))
    size = itemsize.numerator if itemsize.denominator == 1 else itemsize
    tensors: list[BsrTensor] = []
    for suffix in TENSORS:
        order = parameters if not suffix else reversed(parameters)
        tensors += [BsrTensor(name + suffix, shape, size, src, dst) for name, shape, src, dst in order]
    return SwitchPlan(tuple(tensors), cluster, lost)


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
