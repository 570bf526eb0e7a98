"""Which owner sends a slice: the fastest link first, then the least loaded sender (paper §5.3)."""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace

from hetero_megatron.cluster import Cluster

Amount = int | Fraction
_ONE_LINK = "link"


class Sender:
    """Load that every rank has been given so far, by link class; without a cluster all links are equal.

    `balanced=False` ignores links and load and takes the smallest rank.
    """

    def __init__(self, cluster: Cluster | None, balanced: bool = True) -> None:
        self.cluster = cluster
        self.balanced = balanced
        self.load: dict[str, dict[int, Amount]] = {}

    def among(self, owners: Sequence[int]) -> "Choice":
        """Prepare to choose among these owners of one slice, several times."""
        return Choice(self, owners)


class Choice:
    """The owners of one slice, sorted by node; ties go to the earlier owner.

    Owners wait in heaps with the load they had when last seen. Load only grows, so an owner whose entry is
    still true at the top of its heap is the least loaded: near-constant time per receiver.
    """

    def __init__(self, sender: Sender, owners: Sequence[int]) -> None:
        self._sender = sender
        self._owners = owners
        self._heaps: dict[int | None, list[tuple[Amount, int, int]]] = {}
        self._nodes: dict[int, list[int]] | None = None

    def to(self, receiver: int, weight: Amount) -> int:
        """The owner that sends to `receiver`; its load grows by `weight`."""
        cluster = self._sender.cluster
        if not self._sender.balanced:
            return min(self._owners)
        if cluster is None:
            return self._least(None, self._owners, _ONE_LINK, weight)
        if self._nodes is None:
            self._nodes = {}
            for owner in self._owners:
                self._nodes.setdefault(cluster.node_of(owner), []).append(owner)
        node = cluster.node_of(receiver)
        near = self._nodes.get(node)
        if near is None:
            return self._least(None, self._owners, cluster.inter_node.name, weight)
        if (
            len(near) == len(self._owners)
            or cluster.link(near[0], receiver).gb_per_s > cluster.inter_node.gb_per_s
        ):
            return self._least(node, near, cluster.link(near[0], receiver).name, weight)
        return self._slow_node(cluster, receiver, weight)

    def _least(self, pool: int | None, owners: Sequence[int], link: str, weight: Amount) -> int:
        load = self._sender.load.setdefault(link, {})
        heap = self._heaps.get(pool)
        if heap is None:
            heap = self._heaps[pool] = [
                (load.get(owner, 0), place, owner) for place, owner in enumerate(owners)
            ]
            heapify(heap)
        while True:
            seen, place, owner = heap[0]
            now = load.get(owner, 0)
            if now == seen:
                break
            heapreplace(heap, (now, place, owner))
        load[owner] = now + weight
        return owner

    def _slow_node(self, cluster: Cluster, receiver: int, weight: Amount) -> int:
        """Choose where links between nodes are at least as fast as those inside the receiver's node."""
        links = [(owner, cluster.link(owner, receiver)) for owner in self._owners]
        fastest = max(link.gb_per_s for _, link in links)
        load = self._sender.load
        owner, link = min(
            ((owner, link) for owner, link in links if link.gb_per_s == fastest),
            key=lambda each: load.get(each[1].name, {}).get(each[0], 0),
        )
        by_rank = load.setdefault(link.name, {})
        by_rank[owner] = by_rank.get(owner, 0) + weight
        return owner
