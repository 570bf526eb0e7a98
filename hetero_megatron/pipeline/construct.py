"""Pipelines read off the Reshards: which rank is on which stage of which pipeline (paper A.2, Figure 21)."""

from collections.abc import Iterable, Iterator, Sequence

from hetero_megatron.comm.steps import Collective, CommPlan, Transfer
from hetero_megatron.errors import ScheduleError

Pipelines = tuple[tuple[tuple[int, ...], ...], ...]
"""Pipelines of stages of ranks."""


def construct(
    plans: Sequence[CommPlan], ranks: Iterable[int], shared: Iterable[Sequence[int]] = ()
) -> Pipelines:
    """The pipelines that the forward Reshards `plans`, in forward order, make of `ranks`.

    `shared` are ranks that stand on one stage though no Reshard joins them: context-parallel parts, which meet
    inside attention.

    Every rank starts as a pipeline of its own. Ranks that share a subgroup or a collective are on one stage
    of one pipeline; a transfer puts its receiver on the stage after its sender. A transfer between ranks
    that both hold the tensor before and after moves rows inside a stage. One from the last stage back to
    stage 0 starts the next chunk of an interleaved schedule. Ranks, and with them pipelines, stand in the
    order in which the Reshards first name them; ranks that no Reshard names come last.

    Raises:
        ScheduleError: a Reshard names an unknown rank, skips a stage, or joins ranks of different stages.
    """
    walk = _Walk(tuple(ranks))
    done: set[int] = set()
    for number, plan in enumerate(plans):
        if id(plan) not in done:
            done.add(id(plan))
            walk.follow(f"Reshard {number} ({plan.label})", plan)
    for members in shared:
        walk.together("attention", members)
    return walk.pipelines()


def check_against(constructed: Pipelines, expected: Pipelines) -> None:
    """Refuse constructed pipelines that are not the expected ones; the order of ranks in a stage is free.

    Raises:
        ScheduleError: naming pipeline and stage, the ranks found and the ranks wanted.
    """
    found_of = {rank: found for found in constructed for stage in found for rank in stage}
    for number, wanted in enumerate(expected):
        found = found_of.get(wanted[0][0], ())
        for stage in range(max(len(found), len(wanted))):
            has = tuple(sorted(found[stage])) if stage < len(found) else ()
            wants = tuple(sorted(wanted[stage])) if stage < len(wanted) else ()
            if has != wants:
                raise ScheduleError(
                    f"pipeline {number} stage {stage}: the Reshards put ranks {has} there, expected {wants}"
                )
    left = sorted(set(found_of) - {rank for wanted in expected for stage in wanted for rank in stage})
    if left:
        raise ScheduleError(
            f"the Reshards make a pipeline {found_of[left[0]]}, but rank {left[0]} is expected in none"
        )


def position(pipelines: Pipelines, rank: int) -> tuple[int, int]:
    """(pipeline, stage) of `rank`.

    Raises:
        ScheduleError: the rank is in no pipeline.
    """
    for number, pipeline in enumerate(pipelines):
        for stage, members in enumerate(pipeline):
            if rank in members:
                return number, stage
    raise ScheduleError(f"rank {rank} is in no pipeline of {pipelines}")


class _Walk:
    """Pipelines under construction: every rank knows its pipeline, every pipeline its stages."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._stages: dict[int, list[set[int]]] = {rank: [{rank}] for rank in ranks}
        self._place: dict[int, tuple[int, int]] = {rank: (rank, 0) for rank in ranks}
        self._named: dict[int, None] = {}

    def follow(self, name: str, plan: CommPlan) -> None:
        """Merge and append what one Reshard asks for."""
        for annotation in (plan.src, plan.dst):
            for rank in annotation.ranks:
                if rank not in self._place:
                    raise ScheduleError(
                        f"{name} names rank {rank}, which is not among the {len(self._place)} ranks"
                    )
                self._named.setdefault(rank)
        before, after = set(plan.src.ranks), set(plan.dst.ranks)
        for ranks in _together(plan):
            self.together(name, ranks)
        for step in (step for stage in plan.stages for step in stage.steps):
            if isinstance(step, Transfer) and step.src != step.dst:
                inside = step.src in after and step.dst in before
                self._join(name, step.src, step.dst, 0 if inside else 1)

    def together(self, name: str, ranks: Sequence[int]) -> None:
        """Put ranks on one stage."""
        for rank in ranks[1:]:
            self._join(name, ranks[0], rank, 0)

    def _join(self, name: str, first: int, second: int, shift: int) -> None:
        """Bring `second` into the pipeline of `first`, `shift` stages after it."""
        (one, at), (other, other_at) = self._place[first], self._place[second]
        if one == other:
            self._check_same(name, first, second, shift)
            return
        offset = at + shift - other_at
        if offset < 0:
            one, other, offset = other, one, -offset
        stages, joining = self._stages[one], self._stages.pop(other)
        stages += [set() for _ in range(offset + len(joining) - len(stages))]
        for index, members in enumerate(joining, start=offset):
            stages[index] |= members
            self._place.update(dict.fromkeys(members, (one, index)))

    def _check_same(self, name: str, first: int, second: int, shift: int) -> None:
        pipeline, at = self._place[first]
        to = self._place[second][1]
        next_chunk = shift == 1 and to == 0 and at == len(self._stages[pipeline]) - 1 > 0
        if to - at != shift and not next_chunk:
            relation = "on one stage" if shift == 0 else "on successive stages"
            raise ScheduleError(
                f"{name} puts ranks {first} and {second} {relation}, "
                f"but earlier Reshards put them on stages {at} and {to} of one pipeline"
            )

    def pipelines(self) -> Pipelines:
        """What has been built, in order of first naming."""
        order = {
            rank: number
            for number, rank in enumerate([*self._named, *(r for r in self._place if r not in self._named)])
        }
        built = [
            tuple(tuple(sorted(members, key=order.__getitem__)) for members in stages)
            for stages in self._stages.values()
        ]
        return tuple(sorted(built, key=lambda pipeline: min(order[rank] for rank in pipeline[0])))


def _together(plan: CommPlan) -> Iterator[tuple[int, ...]]:
    """The sets of ranks that one Reshard puts on one stage."""
    for annotation in (plan.src, plan.dst):
        for group in annotation.groups:
            yield group.ranks
    for stage in plan.stages:
        for step in stage.steps:
            if isinstance(step, Collective):
                yield step.ranks
