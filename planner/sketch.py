"""Sketches and drafts of a plan: lanes without ranks (paper A.1, first level)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.planner.lanes import Blocks, Lane, Setting
from hetero_megatron.planner.problem import Block


@dataclass(frozen=True, slots=True)
class Sketch:
    """Which blocks make which pipelines: lanes in descending order, so that equal plans are equal values."""

    lanes: tuple[Blocks, ...]
    rows: int
    zero: int

    @staticmethod
    def of(lanes: Sequence[Blocks], rows: int, zero: int) -> "Sketch":
        """The sketch of these lanes, whatever their order."""
        return Sketch(tuple(sorted(lanes, reverse=True)), rows, zero)

    @property
    def setting(self) -> Setting:
        """What the lanes share."""
        replicas = sum(blocks[0].cp for blocks in self.lanes)
        if not self.zero or replicas == 1:
            return Setting(self.rows, replicas, 0)
        whole = all(block.tp == 1 for lane in self.lanes for block in lane)
        return Setting(self.rows, replicas, self.zero, whole)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return tuple(block for lane in self.lanes for block in lane)


@dataclass(frozen=True, slots=True)
class Draft:
    """A sketch with layers and micro-batches, and the seconds of a step that it would about take."""

    sketch: Sketch
    lanes: tuple[Lane, ...]
    micro_batches: tuple[int, ...]
    pipeline_seconds: float
    seconds: float
    timed: bool = False
