"""The devices that a strategy runs on and the links between them (paper §5.3, Table 7)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hetero_megatron.device_specs import SPECS
from hetero_megatron.errors import ClusterError

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A class of links: its name in reports, bandwidth in GB/s and latency in seconds.

    `shared`: all devices of a node have the bandwidth together (one network adapter); otherwise each has its own.
    """

    name: str
    gb_per_s: float
    latency_s: float = 1e-5
    shared: bool = False

    def __post_init__(self) -> None:
        if self.gb_per_s <= 0:
            raise ClusterError(f"link {self.name!r}: {self.gb_per_s} GB/s; a bandwidth is positive")


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A model of device: memory in bytes, dense BF16 FLOP/s, and the link between two of them in one node."""

    name: str
    memory_bytes: int
    flops: float
    link: Link

    def slowed(self, speed: float) -> "DeviceKind":
        """Devices of this model that were found to compute at `speed` times what others do.

        >>> KINDS["h20"].slowed(0.5).name
        'h20 at 0.5'
        """
        return replace(self, name=f"{model_of(self.name)}{_AT}{speed:g}", flops=self.flops * speed)


_AT = " at "


def model_of(kind: str) -> str:
    """The model of device behind the name of a kind: `h20` for `h20` and for `h20 at 0.5`."""
    return kind.partition(_AT)[0]


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device and the node it sits in."""

    rank: int
    kind: str
    node: int


KINDS = {
    spec.name: DeviceKind(spec.name, spec.memory_bytes, spec.flops, Link(spec.link, spec.link_gb_per_s))
    for spec in SPECS
}
INFINIBAND = Link("ib", 50.0)


@dataclass(frozen=True)
class Cluster:
    """Devices by rank, the kinds they are of, and the link between nodes.

    `between`: (kind, kind, link) where nodes of two kinds are connected otherwise than by `inter_node`.
    """

    devices: tuple[Device, ...]
    kinds: tuple[DeviceKind, ...]
    inter_node: Link = INFINIBAND
    between: tuple[tuple[str, str, Link], ...] = ()

    def __post_init__(self) -> None:
        by_rank: dict[int, Device] = {}
        names = {kind.name for kind in self.kinds}
        for device in self.devices:
            if device.rank in by_rank:
                raise ClusterError(
                    f"rank {device.rank} is listed twice (nodes {by_rank[device.rank].node}, {device.node})"
                )
            if device.kind not in names:
                raise ClusterError(
                    f"rank {device.rank} is a {device.kind!r}; the cluster knows {sorted(names)}"
                )
            by_rank[device.rank] = device
        if not by_rank:
            raise ClusterError("a cluster needs at least one device")
        object.__setattr__(self, "_by_rank", by_rank)
        object.__setattr__(self, "_kinds", {kind.name: kind for kind in self.kinds})
        for one, other, link in self.between:
            if not {one, other} <= names:
                raise ClusterError(
                    f"link {link.name!r} is between nodes of {one!r} and {other!r}; the cluster knows {sorted(names)}"
                )
        pairs = {frozenset((one, other)): link for one, other, link in self.between}
        object.__setattr__(self, "_between", pairs)
        object.__setattr__(self, "_hash", hash((self.devices, self.kinds, self.inter_node, self.between)))

    def __hash__(self) -> int:
        known: int = self._hash  # type: ignore[attr-defined]  # set once in __post_init__
        return known

    @staticmethod
    def of_nodes(
        nodes: Mapping[str, int], per_node: int = GPUS_PER_NODE, inter_node: Link = INFINIBAND
    ) -> "Cluster":
        """Whole nodes by kind, ranks counted in the mapping's order: `{"h800": 2, "h20": 4}` is the paper's cluster."""
        devices: list[Device] = []
        for kind, count in nodes.items():
            if kind not in KINDS:
                raise ClusterError(f"device kind {kind!r} is unknown; known: {sorted(KINDS)}")
            for _ in range(count * per_node):
                devices.append(Device(len(devices), kind, len(devices) // per_node))
        return Cluster(tuple(devices), tuple(KINDS[kind] for kind in nodes), inter_node)

    @staticmethod
    def local_cpu(count: int) -> "Cluster":
        """`count` CPU ranks on this machine."""
        return Cluster(tuple(Device(rank, "cpu", 0) for rank in range(count)), (KINDS["cpu"],))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order they were listed."""
        return tuple(device.rank for device in self.devices)

    def device(self, rank: int) -> Device:
        """The device of `rank`."""
        by_rank: dict[int, Device] = self._by_rank  # type: ignore[attr-defined]  # set once in __post_init__
        if rank not in by_rank:
            raise ClusterError(f"rank {rank} is not in the cluster (ranks {ranges_text(self.ranks)})")
        return by_rank[rank]

    def kind(self, rank: int) -> DeviceKind:
        """The device kind of `rank`."""
        kinds: dict[str, DeviceKind] = self._kinds  # type: ignore[attr-defined]  # set once in __post_init__
        return kinds[self.device(rank).kind]

    def node_of(self, rank: int) -> int:
        """The node of `rank`."""
        return self.device(rank).node

    def link(self, a: int, b: int) -> Link:
        """The link between two different ranks: the device kind's own inside a node, the cluster's between nodes."""
        if self.node_of(a) == self.node_of(b):
            return self.kind(a).link
        pairs: dict[frozenset[str], Link] = self._between  # type: ignore[attr-defined]  # set once in __post_init__
        return (
            pairs.get(frozenset((self.kind(a).name, self.kind(b).name)), self.inter_node)
            if pairs
            else self.inter_node
        )

    def without(self, ranks: Iterable[int]) -> "Cluster":
        """The cluster after these ranks are gone."""
        gone = set(ranks)
        for rank in sorted(gone):
            self.device(rank)
        return Cluster(
            tuple(d for d in self.devices if d.rank not in gone), self.kinds, self.inter_node, self.between
        )

    def slowed(self, speeds: Mapping[int, float]) -> "Cluster":
        """The cluster with ranks that compute at so many times what their kind does; each speed is a kind of its own.

        >>> [device.kind for device in Cluster.local_cpu(2).slowed({1: 0.25}).devices]
        ['cpu', 'cpu at 0.25']
        """
        slow = {rank: self.kind(rank).slowed(speed) for rank, speed in speeds.items() if speed != 1}
        kinds = dict.fromkeys((*self.kinds, *slow.values()))
        between = tuple(
            (one.name, other.name, link)
            for first, second, link in self.between
            for one in kinds
            for other in kinds
            if (model_of(one.name), model_of(other.name)) == (first, second)
        )
        devices = tuple(replace(d, kind=slow[d.rank].name) if d.rank in slow else d for d in self.devices)
        return Cluster(devices, tuple(kinds), self.inter_node, between)

    def join(self, devices: Iterable[Device]) -> "Cluster":
        """The cluster with these devices added."""
        return Cluster(self.devices + tuple(devices), self.kinds, self.inter_node, self.between)


def ranges_text(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7: ranks or layers for people to read."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in spans)
