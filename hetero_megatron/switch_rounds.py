"""In which messages a switch travels: one per device pair and wave, in rounds of bounded size (paper §7, Figure 14)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.comm import BsrScheme
from hetero_megatron.comm.relay import Route, hops, sizes, straight
from hetero_megatron.comm.sender import Amount

Pair = tuple[int, int]
Wave = dict[Pair, tuple[int, ...]]
"""Messages that travel together: by (sender, receiver) the numbers of the transfers that they hold, in order."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some consecutive tensors of a plan: what is copied, and in which waves of messages the rest travels.

    Without detours there is one wave, and in it one message per pair. Slices on a detour share the messages of the
    pairs that carry them.

    Attributes:
        tensors: numbers of the first tensor and of the one after the last.
        copies: numbers of the scheme's copies.
    """

    tensors: tuple[int, int]
    copies: tuple[int, ...]
    waves: tuple[Wave, ...]


def plan_rounds(
    scheme: BsrScheme, limit_bytes: int, routes: Sequence[Route] | None = None
) -> tuple[Round, ...]:
    """Cut a scheme so that no rank has more than `limit_bytes` of messages at a time, sent and received together.

    One round where that is enough. A single tensor that is larger travels in a round by itself.
    """
    tensors = scheme.tensors
    routes = routes or straight(scheme)
    amounts = sizes(scheme)
    by_tensor: list[list[int]] = [[] for _ in tensors]
    for number, transfer in enumerate(scheme.transfers):
        by_tensor[transfer.tensor].append(number)
    edges, load = [0], dict[int, Amount]()
    for place, numbers in enumerate(by_tensor):
        own: dict[int, Amount] = {}
        for number in numbers:
            for _, sender, receiver in hops(routes[number]):
                own[sender] = own.get(sender, 0) + amounts[number]
                own[receiver] = own.get(receiver, 0) + amounts[number]
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
    waves: dict[int, dict[Pair, list[int]]] = {}
    for number in numbers:
        for wave, *pair in hops(routes[number]):
            waves.setdefault(wave, {}).setdefault((pair[0], pair[1]), []).append(number)
    return tuple({pair: tuple(parts) for pair, parts in waves[wave].items()} for wave in sorted(waves))
