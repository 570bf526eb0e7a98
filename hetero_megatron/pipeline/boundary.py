"""Which part of the model follows which across the stages of one pipeline (paper A.2)."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action, Kind

Place = tuple[int, int]
"""A part of the model: (stage, chunk on that stage)."""


@dataclass(frozen=True)
class Boundaries:
    """The (upstream, downstream) places between which activations go forward and gradients go back.

    Raises:
        ScheduleError: a place has two places before it or two after it.
    """

    pairs: tuple[tuple[Place, Place], ...]

    def __post_init__(self) -> None:
        for side, word in ((0, "after"), (1, "before")):
            ends = [pair[side] for pair in self.pairs]
            for place in ends:
                if ends.count(place) > 1:
                    raise ScheduleError(
                        f"stage {place[0]} chunk {place[1]} has {ends.count(place)} places {word} it, not 1"
                    )

    @staticmethod
    def chain(stages: int, chunks: int = 1) -> "Boundaries":
        """Chunk by chunk through all stages; the last stage of a chunk feeds stage 0 of the next one."""
        places = [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
        return Boundaries(tuple(pairwise(places)))

    @cached_property
    def downstream(self) -> dict[Place, Place]:
        """The place that follows each place."""
        return dict(self.pairs)

    @cached_property
    def upstream(self) -> dict[Place, Place]:
        """The place that precedes each place."""
        return {after: before for before, after in self.pairs}

    def input_of(self, stage: int, compute: Action) -> Place | None:
        """The place whose output `compute` on `stage` needs, on whichever stage it is, or None."""
        return (self.upstream if compute.kind == "F" else self.downstream).get((stage, compute.chunk))

    def receives_from(self, stage: int, compute: Action) -> Place | None:
        """The place whose output `compute` on `stage` needs over the wire, or None."""
        place = self.input_of(stage, compute)
        return None if place is None or place[0] == stage else place

    def sends_to(self, stage: int, compute: Action) -> Place | None:
        """The place that needs the output of `compute` on `stage` over the wire, or None."""
        place = (self.downstream if compute.kind == "F" else self.upstream).get((stage, compute.chunk))
        return None if place is None or place[0] == stage else place

    def peer(self, stage: int, item: Action) -> tuple[int, Action] | None:
        """Stage and action that match `item` of `stage`: RECV_F0 of stage 1 matches SEND_F0 of stage 0."""
        forward = item.kind in ("SEND_F", "RECV_B")
        place = (self.downstream if forward else self.upstream).get((stage, item.chunk))
        if place is None or place[0] == stage:
            return None
        return place[0], Action(_MATCH[item.kind], item.micro_batch, place[1])


_MATCH: dict[Kind, Kind] = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
