"""What stages cost on one micro-batch, and what travels between them (paper A.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.cluster import Link
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.unit_cost import NOTHING, Lengths, Seconds, UnitCosts
from hetero_megatron.strategy import Pipeline, Stage


@dataclass(frozen=True, slots=True)
class PartShape:
    """A context-parallel part as the cost of its layers depends on it."""

    kinds: tuple[str, ...]
    tp: int
    link: Link


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage as its cost depends on it: no rank numbers."""

    parts: tuple[PartShape, ...]
    link: Link
    chunks: tuple[tuple[tuple[str, int], ...], ...]


class StageCosts(UnitCosts):
    """Costs of stages; a stage is as slow as the slowest of its ranks."""

    @cached_property
    def _shapes(self) -> dict[Stage, StageShape]:
        return {}

    @cached_property
    def _chunks(self) -> dict[tuple[object, ...], Seconds]:
        return {}

    def shape(self, stage: Stage) -> StageShape:
        """What the cost of a stage depends on."""
        known = self._shapes.get(stage)
        if known is None:
            parts = tuple(self._part(part) for part in stage.parts)
            between = self.slowest_link([part[0] for part in stage.parts])
            chunks = []
            for first, last in stage.chunks:
                kinds: dict[str, int] = {}
                for layer in range(first, last + 1):
                    kinds[stage.recompute_of(layer)] = kinds.get(stage.recompute_of(layer), 0) + 1
                chunks.append(tuple(kinds.items()))
            self._shapes[stage] = known = StageShape(parts, between, tuple(chunks) or ((),))
        return known

    def _part(self, ranks: tuple[int, ...]) -> PartShape:
        kinds = tuple(dict.fromkeys(self.cluster.kind(rank).name for rank in ranks))
        return PartShape(kinds, len(ranks), self.slowest_link(ranks))

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link between neighbours of a ring of ranks."""
        if len(ranks) < 2:
            return self.cluster.kind(ranks[0]).link
        links = [
            self.cluster.link(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True) if a != b
        ]
        return min(links, key=bytes_per_second)

    def stage(self, stage: Stage, lengths: Lengths, first: bool, last: bool) -> Seconds:
        """All layers of a stage on one micro-batch, the embedding on the first and the head on the last stage."""
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        sizes = stage.tensor_parallel_sizes
        shape = self.shape(stage)
        found = NOTHING
        for number in range(len(shape.chunks)):
            ends = (first and number == 0, last and number == len(shape.chunks) - 1)
            found = found + self._chunk(shape, number, tokens, pairs, sizes, *ends)
        return found

    def _chunk(
        self,
        shape: StageShape,
        number: int,
        tokens: int,
        pairs: int,
        shares: tuple[int, ...],
        first: bool,
        last: bool,
    ) -> Seconds:
        key = (shape, number, tokens, pairs, shares, first, last)
        known = self._chunks.get(key)
        if known is None:
            total = sum(shares)
            each = [
                self._part_chunk(shape, part, kind, number, tokens, pairs, share / total, first, last)
                for part, share in zip(shape.parts, shares, strict=True)
                for kind in part.kinds
            ]
            known = Seconds(max(one.forward for one in each), max(one.backward for one in each))
            self._chunks[key] = known
        return known

    def _part_chunk(
        self,
        shape: StageShape,
        part: PartShape,
        kind: str,
        number: int,
        tokens: int,
        pairs: int,
        share: float,
        first: bool,
        last: bool,
    ) -> Seconds:
        cp, forward, backward = len(shape.parts), 0.0, 0.0
        for recompute, count in shape.chunks[number]:
            one = self.layer_of(kind, part.tp, cp, part.link, shape.link, tokens, pairs, recompute, share)
            forward += count * one.forward
            backward += count * one.backward
        for unit, held in (("embedding", first), ("head", last)):
            if held:
                one = self.unit(kind, part.tp, cp, unit, tokens, pairs, share)  # type: ignore[arg-type]
                forward += one.forward
                backward += one.backward
        return Seconds(forward, backward)

    def chunk(self, pipeline: Pipeline, stage: int, chunk: int, tokens: int, pairs: int) -> Seconds:
        """One chunk of one stage on a micro-batch of so many tokens and pairs, its share of embedding and head included."""
        first = stage == 0 and chunk == 0
        last = stage == len(pipeline.stages) - 1 and chunk == pipeline.chunks - 1
        shape = self.shape(pipeline.stages[stage])
        return self._chunk(shape, chunk, tokens, pairs, pipeline.token_shares, first, last)

    def slowest_part(
        self, shape: StageShape, unit: str, tokens: int, pairs: int, shares: tuple[int, ...]
    ) -> float:
        """Both passes of one unit on the slowest part of a stage."""
        cp, total, slowest = len(shape.parts), sum(shares), 0.0
        for part, share in zip(shape.parts, shares, strict=True):
            for kind in part.kinds:
                if unit == "layer":
                    one = self.layer_of(
                        kind, part.tp, cp, part.link, shape.link, tokens, pairs, "none", share / total
                    )
                else:
                    one = self.unit(kind, part.tp, cp, unit, tokens, pairs, share / total)  # type: ignore[arg-type]
                slowest = max(slowest, one.total)
        return slowest

    def boundary(self, sender: Stage, receiver: Stage, tokens: int) -> float:
        """Seconds that one micro-batch's activations, or their gradients, travel between two stages.

        Each part sends to the part of its number; where their TP differs, the side with fewer ranks takes longer.
        """
        slowest = 0.0
        total = len(sender.ranks)
        for out, into in zip(sender.parts, receiver.parts, strict=True):
            size = tokens * len(out) / total * self.config.hidden_size * self.item
            if self.sequence_parallel:
                size /= min(len(out), len(into))
            link = min(
                (self.cluster.link(out[0], into[0]), self.cluster.link(out[-1], into[-1])),
                key=bytes_per_second,
            )
            if link.shared:
                size *= max(len(out), len(into)) if not self.sequence_parallel else min(len(out), len(into))
            slowest = max(slowest, self.profiles.transfer_seconds(link, "p2p", 2, size))
        return slowest
