"""Which losses of ranks leave every layer's data in a survivor (paper §7, A.1 (b))."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import combinations

from hetero_megatron.strategy import Strategy

Span = tuple[Fraction, Fraction]


def holders(strategy: Strategy, layer: int) -> Iterator[tuple[int, Span]]:
    """Ranks that hold weights of a layer, and which share of them: tensor-parallel ranks cut a layer evenly."""
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            if layer in stage.layer_numbers:
                for part in stage.parts:
                    for place, rank in enumerate(part):
                        yield rank, (Fraction(place, len(part)), Fraction(place + 1, len(part)))


def lost_layers(strategy: Strategy, layers: int, lost: Iterable[int]) -> tuple[int, ...]:
    """Layers of which no survivor has some share of the weights."""
    gone = set(lost)
    found: list[int] = []
    known: dict[tuple[tuple[int, Span], ...], bool] = {}
    for layer in range(layers):
        own = tuple(holders(strategy, layer))
        if own not in known:
            known[own] = _covered([span for rank, span in own if rank not in gone])
        if not known[own]:
            found.append(layer)
    return tuple(found)


def _covered(spans: list[Span]) -> bool:
    """Whether the spans leave no gap in [0, 1)."""
    reached = Fraction(0)
    for first, end in sorted(spans):
        if first > reached:
            return False
        reached = max(reached, end)
    return reached >= 1


def lost_states(strategy: Strategy, layers: int, lost: Iterable[int]) -> tuple[int, ...]:
    """Layers whose optimizer states (master weights and moments) survivors have not all of.

    Under ZeRO-1 every replica keeps a part of them that no other has, so a lost rank takes its part with it.
    """
    gone = set(lost)
    replicas = sum(len(pipeline.stages[0].parts) for pipeline in strategy.pipelines)
    if not strategy.zero or replicas == 1:
        return lost_layers(strategy, layers, gone)
    return tuple(
        layer for layer in range(layers) if any(rank in gone for rank, _ in holders(strategy, layer))
    )


def survives(strategy: Strategy, layers: int, lost: Iterable[int]) -> bool:
    """Whether training can go on from what survivors hold, states included; the ends go with their layers."""
    return not lost_states(strategy, layers, tuple(lost))


def fragile(strategy: Strategy, layers: int) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks that are safe to lose alone and fatal together; only ranks of the same layers can be."""
    safe = {rank for rank in strategy.ranks if survives(strategy, layers, (rank,))}
    found: dict[tuple[int, int], None] = {}
    for own in dict.fromkeys(tuple(holders(strategy, layer)) for layer in range(layers)):
        for a, b in combinations(sorted({rank for rank, _ in own} & safe), 2):
            if not _covered([span for rank, span in own if rank not in (a, b)]):
                found[a, b] = None
    return tuple(sorted(found))
