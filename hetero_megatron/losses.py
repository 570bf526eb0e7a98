"""Which losses of ranks a program survives: who else holds each part of its optimizer states, and who keeps copies."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import ranges_text
from hetero_megatron.comm import bsr_table
from hetero_megatron.comm.boxes import numel
from hetero_megatron.program import Program


@lru_cache(maxsize=4096)
def _owners(annotation: Annotation, shape: tuple[int, ...]) -> frozenset[frozenset[int]]:
    return frozenset(
        frozenset(piece.owners) for piece in bsr_table(annotation, annotation) if numel(piece.region, shape)
    )


def owner_sets(program: Program) -> dict[frozenset[int], list[str]]:
    """The sets of ranks that hold the same slices of master weights and moments, and of which parameters."""
    found: dict[frozenset[int], list[str]] = {}
    graph = program.annotated.graph
    for name in graph.parameters:
        for owners in _owners(program.annotated.states[name], graph.parameter_shape(name)):
            found.setdefault(owners, []).append(name)
    return found


def guardians(program: Program) -> dict[int, int]:
    """Who keeps a copy of what a rank alone holds: a rank of another node where there is one, else of another pipeline.

    Ranks whose slices others hold, too, need no guardian. Each rank guards as few as possible.
    """
    alone = sorted({rank for owners in owner_sets(program) if len(owners) == 1 for rank in owners})
    ranks, cluster = program.strategy.ranks, program.cluster
    wards = dict.fromkeys(ranks, 0)
    found = {}
    for rank in alone if len(ranks) > 1 else ():
        place = ranks.index(rank)

        def far(other: int, rank: int = rank, place: int = place) -> tuple[bool, bool, int, int]:
            same_node = cluster.node_of(other) == cluster.node_of(rank)
            same_pipeline = program.pipeline_of(other)[0] == program.pipeline_of(rank)[0]
            return same_node, same_pipeline, wards[other], (ranks.index(other) - place) % len(ranks)

        found[rank] = min((other for other in ranks if other != rank), key=far)
        wards[found[rank]] += 1
    return found


@dataclass(frozen=True, slots=True)
class Survivable:
    """Losses after which some part of the state is nowhere.

    Attributes:
        singles: ranks of which each alone takes something with it.
        pairs: pairs of ranks that do so together, though neither does alone.
        pair_count: how many pairs there are in all.
    """

    singles: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    pair_count: int

    def __str__(self) -> str:
        """One sentence for the report before a run."""
        if self.singles:
            text = f"the loss of rank {ranges_text(self.singles)} goes back to the last checkpoint"
        else:
            text = "no loss of a single rank loses anything"
        if not self.pair_count:
            return f"survival: {text}"
        survived = self.pair_count - len(self.pairs)
        pairs = f"{survived} of {self.pair_count} losses of two ranks at once lose nothing"
        if self.pairs and len(self.pairs) <= 6:
            pairs += f" (all but {', '.join(f'{a} with {b}' for a, b in self.pairs)})"
        return f"survival: {text}; {pairs}"


def survivable(program: Program, kept: Mapping[int, int] | None = None) -> Survivable:
    """Single and double losses that lose state; `kept` are copies by rank and guardian."""
    kept = kept or {}
    sets = [set(owners) | {kept[rank] for rank in owners if rank in kept} for owners in owner_sets(program)]
    ranks = program.strategy.ranks
    singles = tuple(sorted({rank for owners in sets if len(owners) == 1 for rank in owners}))
    fatal = {tuple(sorted(owners)) for owners in sets if len(owners) == 2}
    others = [rank for rank in ranks if rank not in singles]
    pairs = tuple(pair for pair in combinations(others, 2) if pair in fatal)
    return Survivable(singles, pairs, len(others) * (len(others) - 1) // 2)


def stand_ins(program: Program, lost: Collection[int], kept: Mapping[int, int]) -> dict[int, int]:
    """Lost ranks of which a living guardian has a copy, and who that is."""
    return dict(_kept(program, set(lost), kept))


def _kept(program: Program, lost: set[int], kept: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    for rank in sorted(lost & set(program.strategy.ranks)):
        if rank in kept and kept[rank] not in lost:
            yield rank, kept[rank]
