"""What a layer, an embedding and a head cost on one micro-batch, from measured or published figures (paper A.1)."""

from dataclasses import dataclass
from math import log2

from hetero_megatron.cluster import Cluster, DeviceKind, Link, model_of
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.curves import Curve
from hetero_megatron.planner.profiles import Operation, Phase, Profiles, Unit
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.work import ITEM, Work

Lengths = tuple[int, ...]
"""Lengths of the documents of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(factor * self.forward, factor * self.backward)


NOTHING = Seconds(0.0, 0.0)


class UnitCosts:
    """Costs of one model's units on the devices of one cluster; what had to be guessed is named in `warnings`."""

    def __init__(
        self,
        config: LlamaConfig,
        cluster: Cluster,
        profiles: Profiles,
        precision: str,
        sequence_parallel: bool,
        context_parallel: str,
    ) -> None:
        self.config, self.cluster, self.profiles, self.precision = config, cluster, profiles, precision
        self.sequence_parallel, self.context_parallel = sequence_parallel, context_parallel
        self.work, self.item = Work(config), ITEM[precision]
        self.warnings: dict[str, None] = {}
        self._kinds = {kind.name: kind for kind in cluster.kinds}
        self._curves: dict[tuple[str, int, int, Unit, Phase], tuple[Curve, bool]] = {}
        self._units: dict[tuple[object, ...], Seconds] = {}

    def layer(
        self,
        kind: str,
        tp: int,
        cp: int,
        link: Link,
        lengths: Lengths,
        recompute: str = "none",
        share: float | None = None,
    ) -> Seconds:
        """One transformer layer on a micro-batch of documents of these lengths, its TP and CP collectives included.

        `link`: the slowest between ranks of the stage. `share`: of the tokens that this part takes, 1 / cp unless given.
        """
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self.layer_of(kind, tp, cp, link, link, tokens, pairs, recompute, share or 1 / cp)

    def embedding(self, kind: str, tp: int, cp: int, lengths: Lengths) -> Seconds:
        """The embedding of a micro-batch."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self.unit(kind, tp, cp, "embedding", tokens, pairs, 1 / cp)

    def head(self, kind: str, tp: int, cp: int, lengths: Lengths) -> Seconds:
        """Final norm, head and loss of a micro-batch."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self.unit(kind, tp, cp, "head", tokens, pairs, 1 / cp)

    def curve(self, kind: str, tp: int, cp: int, unit: Unit, phase: Phase) -> tuple[Curve, bool]:
        """The time of a unit, and whether it is for whole micro-batches shared by `cp` parts (else for one part's)."""
        key = (kind, tp, cp, unit, phase)
        if key not in self._curves:
            self._curves[key] = self._find_curve(kind, tp, cp, unit, phase)
        return self._curves[key]

    def _find_curve(self, kind: str, tp: int, cp: int, unit: Unit, phase: Phase) -> tuple[Curve, bool]:
        device = self._kinds[kind]
        prior = self.work.curve(device, self.precision, tp, unit, phase)
        for parts in dict.fromkeys((cp, 1)):
            measured = self.profiles.curve(kind, self.precision, tp, parts, unit, phase, prior)
            if measured is not None:
                return measured, parts > 1
        degrees = [t for t, c in self.profiles.measured_degrees(kind, self.precision) if c == 1]
        for near in sorted(degrees, key=lambda each: abs(log2(each / tp))):
            base = self.work.curve(device, self.precision, near, unit, phase)
            measured = self.profiles.curve(kind, self.precision, near, 1, unit, phase, base)
            if measured is not None:
                self._warn(f"{kind}: TP{tp} was not measured; its {unit} is scaled from TP{near}")
                per_token = prior.per_token / base.per_token if base.per_token else 1.0
                return measured.scaled(per_token), False
        if self.profiles.measurements:
            self._warn(f"{kind} in {self.precision} was not measured; published figures stand in for it")
        return prior, False

    def _seconds(
        self,
        kind: str,
        tp: int,
        cp: int,
        unit: Unit,
        phase: Phase,
        tokens: float,
        pairs: float,
        share: float,
    ) -> float:
        curve, whole = self.curve(kind, tp, cp, unit, phase)
        factor = 1.0 if whole else share
        reason = curve.outside(tokens * factor, pairs / tokens if tokens else 0)
        if reason:
            self._warn(f"{kind} TP{tp}: {unit} for {reason}; beyond what was measured this is a guess")
        return curve.seconds(tokens * factor, pairs * factor)

    def unit(self, kind: str, tp: int, cp: int, unit: Unit, tokens: int, pairs: int, share: float) -> Seconds:
        """Any unit on the part that takes `share` of a micro-batch, without what context parallelism adds."""
        key = (kind, tp, cp, unit, tokens, pairs, share)
        if key not in self._units:
            self._units[key] = Seconds(
                self._seconds(kind, tp, cp, unit, "forward", tokens, pairs, share),
                self._seconds(kind, tp, cp, unit, "backward", tokens, pairs, share),
            )
        return self._units[key]

    def layer_of(
        self,
        kind: str,
        tp: int,
        cp: int,
        tp_link: Link,
        cp_link: Link,
        tokens: int,
        pairs: int,
        recompute: str,
        share: float,
    ) -> Seconds:
        """A layer on the part that takes `share` of a micro-batch of so many tokens and pairs of tokens."""
        key = (kind, tp, cp, tp_link, cp_link, tokens, pairs, recompute, share)
        known = self._units.get(key)
        if known is not None:
            return known
        plain = self.unit(kind, tp, cp, "layer", tokens, pairs, share)
        tensor = self._tensor_parallel(self._kinds[kind], tp, tp_link, tokens * share)
        context = NOTHING
        if cp > 1 and not self.curve(kind, tp, cp, "layer", "forward")[1]:
            context = self._context(kind, tp, cp, cp_link, tokens, pairs, share)
        forward = plain.forward + tensor + context.forward
        backward = plain.backward + tensor + context.backward
        if recompute == "full":
            backward += forward
        elif recompute == "selective":
            again = self.work.recomputed(self._kinds[kind], self.precision, tp)
            backward += again.seconds(tokens * share, pairs * share) + context.forward
        self._units[key] = found = Seconds(forward, backward)
        return found

    def _tensor_parallel(self, kind: DeviceKind, tp: int, link: Link, tokens: float) -> float:
        """What a slower link than the node's own adds to one pass; the node's own is in the measured or inferred rate."""
        if tp == 1 or bytes_per_second(link) >= bytes_per_second(kind.link):
            return 0.0
        size = tokens * self.config.hidden_size * self.item
        gather_and_scatter: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
        operations = gather_and_scatter if self.sequence_parallel else ("all_reduce",)
        slow, fast = (
            sum(self.profiles.transfer_seconds(way, each, tp, size) for each in operations)
            for way in (link, kind.link)
        )
        return 2 * (slow - fast)

    def _context(
        self, kind: str, tp: int, cp: int, link: Link, tokens: int, pairs: int, share: float
    ) -> Seconds:
        """Context-parallel exchanges that attention does not hide: ring behind its blocks, Ulysses before and after."""
        config = self.config
        if self.context_parallel == "ulysses":
            sent = tokens * share * (2 * config.query_size + 2 * config.kv_size) / tp * (cp - 1) / cp
            seconds = self.profiles.transfer_seconds(link, "p2p", 2, sent * self.item)
            return Seconds(seconds, seconds)
        received = tokens * (1 - share) * 2 * config.kv_size / tp * self.item
        once = self.profiles.transfer_seconds(link, "p2p", 2, received)
        hidden = [
            0.0
            if model_of(kind) == "cpu"
            else self.curve(kind, tp, cp, "layer", phase)[0].per_pair * pairs * share
            for phase in ("forward", "backward")
        ]
        return Seconds(max(0.0, once - hidden[0]), max(0.0, 2 * once - hidden[1]))

    def _warn(self, text: str) -> None:
        self.warnings[text] = None
