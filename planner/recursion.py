"""When every forward and backward of one pipeline ends, if each starts as soon as it can: compiled once per shape.

The same recursion as `pipeline.spans`, in an order that is worked out once for a schedule, a depth and a number of
micro-batches: to time a pipeline is then one pass over flat tuples (paper §6.3, A.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetero_megatron.errors import PlannerError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.schedule import Tasks, tasks


@dataclass(frozen=True, slots=True)
class Order:
    """Compute actions in an order in which everything comes after what it needs.

    Attributes:
        entries: per action (number of the action before it on its stage, or of none; number of the action whose output it
            needs, or of none; its slot; its boundary's number, or -1 where nothing travels; its micro-batch). "None" is
            the last number, whose end is 0.
        slots: (stage, kind, chunk) of each slot, which take one time per micro-batch.
        boundaries: (stage that sends, stage that receives) of each boundary's number.
        last: per stage, number of its last action.
    """

    entries: tuple[tuple[int, int, int, int, int], ...]
    slots: tuple[tuple[int, str, int], ...]
    boundaries: tuple[tuple[int, int], ...]
    last: tuple[int, ...]

    def run(
        self, seconds: Sequence[float], travel: Sequence[float], ready: Sequence[float], late: bool = True
    ) -> tuple[float, ...]:
        """When every stage is done: `seconds` by slot, `travel` by boundary, no stage starts before it is `ready`.

        `late`: a message travels once its receiver has come to where it is needed, because only then it is asked for,
        as schedules of one chunk per stage are lowered; otherwise as soon as it is sent.
        """
        ends = [0.0] * (len(self.entries) + 1)
        starts = [ready[stage] for stage, _, _ in self.slots]
        for number, (before, need, slot, boundary, _) in enumerate(self.entries):
            start = ends[before] if before >= 0 else starts[slot]
            arrived = ends[need]
            if boundary >= 0:
                if late and start > arrived:
                    arrived = start
                arrived += travel[boundary]
            if arrived > start:
                start = arrived
            ends[number] = start + seconds[slot]
        return tuple(ends[number] for number in self.last)

    def run_varied(
        self,
        seconds: Sequence[Sequence[float]],
        travel: Sequence[Sequence[float]],
        ready: Sequence[float],
        late: bool = True,
    ) -> tuple[float, ...]:
        """The same where times differ by micro-batch: `seconds[slot][micro_batch]`, `travel[boundary][micro_batch]`."""
        ends = [0.0] * (len(self.entries) + 1)
        starts = [ready[stage] for stage, _, _ in self.slots]
        for number, (before, need, slot, boundary, micro_batch) in enumerate(self.entries):
            start = ends[before] if before >= 0 else starts[slot]
            arrived = ends[need]
            if boundary >= 0:
                if late and start > arrived:
                    arrived = start
                arrived += travel[boundary][micro_batch]
            ends[number] = max(start, arrived) + seconds[slot][micro_batch]
        return tuple(ends[number] for number in self.last)


@lru_cache(maxsize=4096)
def order_of(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Order:
    """The order of a named schedule; a lone stage beside interleaved ones runs 1F1B, as `plan_schedule` says."""
    own = "1f1b" if name == "interleaved" and (stages, chunks) == (1, 1) else name
    return compile_order(tasks(own, stages, micro_batches, chunks), Boundaries.chain(stages, chunks))


@lru_cache(maxsize=64)
def order_of_tasks(order: Tasks, chunks: int) -> Order:
    """The order of given tasks."""
    return compile_order(order, Boundaries.chain(len(order), chunks))


def compile_order(order: Tasks, boundaries: Boundaries) -> Order:
    """Work out in what order the actions can be timed.

    Raises:
        PlannerError: the actions wait for each other.
    """
    slots = sorted(
        {(stage, action.kind, action.chunk) for stage, own in enumerate(order) for action in own},
        key=lambda slot: (slot[0], slot[2], slot[1] == "B"),
    )
    slot_numbers = {slot: number for number, slot in enumerate(slots)}
    pairs: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, Action], int] = {}
    entries: list[tuple[int, int, int, int, int]] = []
    at, latest = [0] * len(order), [-1] * len(order)
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(order):
            while at[stage] < len(own):
                action = own[at[stage]]
                place = boundaries.input_of(stage, action)
                need, boundary = -1, -1
                if place is not None:
                    source = (place[0], Action(action.kind, action.micro_batch, place[1]))
                    if source not in numbers:
                        break
                    need = numbers[source]
                    if place[0] != stage:
                        boundary = pairs.setdefault((place[0], stage), len(pairs))
                slot = slot_numbers[stage, action.kind, action.chunk]
                numbers[stage, action] = len(entries)
                entries.append((latest[stage], need, slot, boundary, action.micro_batch))
                latest[stage] = len(entries) - 1
                at[stage] += 1
                moved = True
    for stage, own in enumerate(order):
        if at[stage] < len(own):
            raise PlannerError(
                f"stage {stage} never comes to {own[at[stage]]}: the actions wait for each other"
            )
    return Order(tuple(entries), tuple(slots), tuple(pairs), tuple(latest))
