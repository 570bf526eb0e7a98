"""In which messages a switch travels: one per device pair and wave, in rounds of bounded size (paper §7, Figure 14)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import BsrScheme
from hetero_megatron.comm.boxes import numel
from hetero_megatron.comm.sender import Amount

Route = tuple[int, ...]
"""The ranks that a transfer passes: sender, forwarding ranks if any, receiver."""

Pair = tuple[int, int]
Wave = dict[Pair, tuple[int, ...]]
"""Messages that travel together: by (sender, receiver) the numbers of the transfers that they hold, in order."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some consecutive tensors of a plan: what is copied, and in which waves of messages the rest travels.

    Every message arrives in its wave; a receiver's own slices arrive in the last one, so that a pair has one message
    there and forwarded slices share it.

    Attributes:
        tensors: numbers of the first tensor and of the one after the last.
        copies: numbers of the scheme's copies.
    """

    tensors: tuple[int, int]
    copies: tuple[int, ...]
    waves: tuple[Wave, ...]


def straight(scheme: BsrScheme) -> tuple[Route, ...]:
    """Every transfer from its sender to its receiver."""
    return tuple((each.src, each.dst) for each in scheme.transfers)


def bytes_by_link(
    scheme: BsrScheme, cluster: Cluster, routes: Sequence[Route] | None = None
) -> dict[int, dict[str, Amount]]:
    """Bytes sent by rank and link name, what is passed on included; ranks that send nothing are absent."""
    sent: dict[int, dict[str, Amount]] = {}
    for transfer, route in zip(scheme.transfers, routes or straight(scheme), strict=True):
        tensor = scheme.tensors[transfer.tensor]
        size = numel(transfer.region, tensor.shape) * tensor.itemsize
        for sender, receiver in pairwise(route):
            by_link = sent.setdefault(sender, {})
            link = cluster.link(sender, receiver).name
            by_link[link] = by_link.get(link, 0) + size
    return sent


def plan_rounds(
    scheme: BsrScheme, limit_bytes: int, routes: Sequence[Route] | None = None
) -> tuple[Round, ...]:
    """Cut a scheme so that no rank has more than `limit_bytes` of messages at a time, sent and received together.

    One round where that is enough. A single tensor that is larger travels in a round by itself.
    """
    tensors = scheme.tensors
    routes = routes or straight(scheme)
    by_tensor: list[list[int]] = [[] for _ in tensors]
    for number, transfer in enumerate(scheme.transfers):
        by_tensor[transfer.tensor].append(number)
    edges, load = [0], dict[int, Amount]()
    for place, numbers in enumerate(by_tensor):
        own: dict[int, Amount] = {}
        for number in numbers:
            size = numel(scheme.transfers[number].region, tensors[place].shape) * tensors[place].itemsize
            for sender, receiver in pairwise(routes[number]):
                own[sender] = own.get(sender, 0) + size
                own[receiver] = own.get(receiver, 0) + size
        if place > edges[-1] and any(load.get(rank, 0) + size > limit_bytes for rank, size in own.items()):
            edges.append(place)
            load = {}
        for rank, size in own.items():
            load[rank] = load.get(rank, 0) + size
    spans = list(zip(edges, [*edges[1:], len(tensors)], strict=True))
    copies: list[list[int]] = [[] for _ in tensors]
    for number, copy in enumerate(scheme.copies):
        copies[copy.tensor].append(number)
    return tuple(
        Round(
            (first, end),
            tuple(number for numbers in copies[first:end] for number in numbers),
            _waves([number for numbers in by_tensor[first:end] for number in numbers], routes),
        )
        for first, end in spans
    )


def _waves(numbers: Sequence[int], routes: Sequence[Route]) -> tuple[Wave, ...]:
    hops = max((len(routes[number]) - 1 for number in numbers), default=0)
    waves: list[dict[Pair, list[int]]] = [{} for _ in range(hops)]
    for number in numbers:
        route = routes[number]
        for place, pair in enumerate(pairwise(route), hops - len(route) + 1):
            waves[place].setdefault(pair, []).append(number)
    return tuple({pair: tuple(parts) for pair, parts in wave.items()} for wave in waves)
