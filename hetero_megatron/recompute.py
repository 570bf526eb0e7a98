"""Which operators are computed again in the backward pass, as runs of nodes (Megatron's activation recomputation).

`full`: everything of a layer behind its `entry`, so that only the residual stream is kept. `selective`: the core
attention and the gate of the feed-forward block. A selective run also holds the matrix product behind it, so that
what this product would keep is not kept either; the product itself is not run again, because recomputation ends
as soon as the last value that a backward needs is there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.graph.nodes import Node

ENTRY = "entry"
# The first operators of a selective run, and the product that closes it, by the last part of their module's name.
SELECTIVE: Mapping[str, frozenset[str]] = {
    "wo": frozenset({"rope", "attention"}),
    "down": frozenset({"swiglu"}),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Nodes [first, end) of a chunk that are checkpointed together: only what enters them is kept."""

    first: int
    end: int


def recomputed_runs(nodes: Sequence[Node], recompute_of: Callable[[int], str]) -> tuple[Run, ...]:
    """The runs of a chunk's nodes, in order; `recompute_of` says full, selective or none for a layer number."""
    runs: list[Run] = []
    for layer, first, end in _layers(nodes):
        kind = recompute_of(layer)
        if kind == "full":
            runs.append(Run(first, end))
        elif kind == "selective":
            runs += _selective(nodes, first, end)
    return tuple(run for run in runs if run.first < run.end)


def external_values(nodes: Sequence[Node], run: Run) -> tuple[str, ...]:
    """What enters a run: the arguments of its nodes that it does not make itself, in order of first use."""
    inside = nodes[run.first : run.end]
    made = {node.name for node in inside}
    return tuple(dict.fromkeys(name for node in inside for name in node.arguments if name not in made))


def _layers(nodes: Sequence[Node]) -> list[tuple[int, int, int]]:
    """(layer, first, end) of each layer's nodes behind its entry; a `+` belongs to the layer around it."""
    found: list[tuple[int, int, int]] = []
    for place, node in enumerate(nodes):
        if not node.module:
            layer = found[-1][0] if found and found[-1][2] == place else None
        else:
            layer = int(node.module.split(".")[1]) if node.module.startswith("layers.") else None
        if layer is None or _role(node) == ENTRY:
            continue
        if found and found[-1][0] == layer and found[-1][2] == place:
            found[-1] = (layer, found[-1][1], place + 1)
        else:
            found.append((layer, place, place + 1))
    return found


def _selective(nodes: Sequence[Node], first: int, end: int) -> list[Run]:
    runs = []
    for place in range(first, end):
        wanted = SELECTIVE.get(_role(nodes[place]), frozenset())
        start = place
        while start > first and _role(nodes[start - 1]) in wanted:
            start -= 1
        if start < place:
            runs.append(Run(start, place + 1))
    return runs


def _role(node: Node) -> str:
    return node.module.rsplit(".", 1)[-1]
