"""Ways over other ranks: a slice with one owner leaves its node through all network cards of the node (paper §7, Table 4).

Fused BSR balances among owners. Where a slice has a single living owner there is nothing to balance: in the paper's
switch C1 -> C2 rank 15 sends 11.5 of the node's 14.5 units through its own card. Inside a node links are faster by an
order of magnitude, so that it pays to hand slices to neighbours, which send them on, and to let the neighbours of a
receiver take them in.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.boxes import numel
from hetero_megatron.comm.bsr import BsrScheme
from hetero_megatron.comm.sender import Amount

Route = tuple[int, int, int, int]
"""The ranks that a transfer passes: its sender, the one whose card sends it, the one that takes it in, its receiver."""

Hop = tuple[int, int, int]
"""Wave, sender, receiver: 0 inside the sender's node, 1 from end to end or to another node, 2 inside the receiver's."""


def straight(scheme: BsrScheme) -> tuple[Route, ...]:
    """Every transfer from its sender to its receiver."""
    return tuple((each.src, each.src, each.dst, each.dst) for each in scheme.transfers)


def hops(route: Route) -> tuple[Hop, ...]:
    """The messages in which a transfer travels.

    >>> hops((3, 3, 5, 5)), hops((3, 0, 5, 5))
    (((1, 3, 5),), ((0, 3, 0), (1, 0, 5)))
    """
    return tuple((wave, *pair) for wave, pair in enumerate(pairwise(route)) if pair[0] != pair[1])


def sizes(scheme: BsrScheme) -> tuple[Amount, ...]:
    """Bytes of every transfer."""
    tensors = scheme.tensors
    return tuple(
        numel(each.region, tensors[each.tensor].shape) * tensors[each.tensor].itemsize
        for each in scheme.transfers
    )


def bytes_by_link(
    scheme: BsrScheme, cluster: Cluster, routes: Sequence[Route] | None = None
) -> dict[int, dict[str, Amount]]:
    """Bytes sent by rank and link name, what is passed on included; ranks that send nothing are absent."""
    sent: dict[int, dict[str, Amount]] = {}
    for size, route in zip(sizes(scheme), routes or straight(scheme), strict=True):
        for _, sender, receiver in hops(route):
            by_link = sent.setdefault(sender, {})
            link = cluster.link(sender, receiver).name
            by_link[link] = by_link.get(link, 0) + size
    return sent


def seconds(scheme: BsrScheme, cluster: Cluster, routes: Sequence[Route] | None = None) -> float:
    """How long the transfers take if every link of every rank runs at full bandwidth in each direction.

    Waves travel one after the other; in each the busiest link of a rank counts.
    """
    waves: dict[int, dict[tuple[int, str, bool], float]] = {}
    for size, route in zip(sizes(scheme), routes or straight(scheme), strict=True):
        for wave, sender, receiver in hops(route):
            busy = waves.setdefault(wave, {})
            link = cluster.link(sender, receiver)
            for end in ((sender, link.name, True), (receiver, link.name, False)):
                busy[end] = busy.get(end, 0.0) + float(size) / (link.gb_per_s * 1e9)
    return sum(max(busy.values()) for busy in waves.values())


def relay(scheme: BsrScheme, cluster: Cluster, ranks: Iterable[int]) -> tuple[Route, ...] | None:
    """Routes that share a node's traffic to other nodes among the cards of its `ranks`, or None where it does not pay.

    Ranks that the cluster does not know carry nothing. Large transfers choose first. A transfer goes straight while
    its sender and its receiver have not had their share.
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(set(ranks) & set(cluster.ranks)):
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    amounts = sizes(scheme)
    crossing = [
        number
        for number, each in enumerate(scheme.transfers)
        if cluster.node_of(each.src) != cluster.node_of(each.dst)
    ]
    out, back = _Cards(nodes, cluster), _Cards(nodes, cluster)
    for number in crossing:
        out.expect(scheme.transfers[number].src, amounts[number])
        back.expect(scheme.transfers[number].dst, amounts[number])
    routes = list(straight(scheme))
    for number in sorted(crossing, key=lambda each: -amounts[each]):
        src, dst, size = routes[number][0], routes[number][3], amounts[number]
        routes[number] = (src, out.take(src, size), back.take(dst, size), dst)
    found = tuple(routes)
    return found if seconds(scheme, cluster, found) < seconds(scheme, cluster) else None


class _Cards:
    """Load of every rank's card to other nodes in one direction, and the share of each card of a node."""

    def __init__(self, nodes: dict[int, list[int]], cluster: Cluster) -> None:
        self._nodes, self._cluster = nodes, cluster
        self._load: dict[int, Amount] = {rank: 0 for ranks in nodes.values() for rank in ranks}
        self._total: dict[int, Amount] = dict.fromkeys(nodes, 0)

    def expect(self, rank: int, size: Amount) -> None:
        """A transfer of `rank` is among those that will be taken."""
        self._total[self._cluster.node_of(rank)] += size

    def take(self, rank: int, size: Amount) -> int:
        """The rank whose card carries a transfer of `rank`."""
        node = self._cluster.node_of(rank)
        share = self._total[node] / len(self._nodes[node])
        # A neighbour is worth the way only over a link that is faster than the card.
        near = [
            each
            for each in self._nodes[node]
            if each == rank or self._cluster.link(rank, each).gb_per_s > self._cluster.inter_node.gb_per_s
        ]
        own = self._load[rank] + size <= share
        chosen = rank if own else min(near, key=lambda each: (self._load[each], each != rank))
        self._load[chosen] += size
        return chosen
