"""What ranks do to change a tensor's layout: copies, transfers and collectives, in stages (paper §5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hetero_megatron.annotation import Annotation, Region
from hetero_megatron.comm.boxes import numel

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Copy:
    """`rank` keeps `region`: from its input shard into its output shard, no traffic."""

    rank: int
    region: Region

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one rank that takes part."""
        return (self.rank,)


@dataclass(frozen=True, slots=True)
class Transfer:
    """`src` sends `region` of its input shard to `dst`, which writes it into its output shard."""

    src: int
    dst: int
    region: Region

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sender, then receiver."""
        return (self.src, self.dst)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over `ranks`, in this order, on the same `region` of all their shards.

    all_reduce: every rank ends with the sum of `region`; `dim` is None.
    reduce_scatter: rank i ends with the sum of `region.cut(dim, i, len(ranks))`.
    all_gather: rank i brings `region.cut(dim, i, len(ranks))`, every rank ends with `region`.
    Pieces may differ by a row, or be empty, when the dim does not divide.
    """

    kind: CollectiveKind
    ranks: tuple[int, ...]
    region: Region
    dim: int | None = None

    def piece(self, rank: int) -> Region:
        """What `rank` receives in a reduce_scatter or brings to an all_gather; `region` in an all_reduce."""
        if self.dim is None:
            return self.region
        return self.region.cut(self.dim, self.ranks.index(rank), len(self.ranks))


Step = Copy | Transfer | Collective


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that may all run at once: they read the stage's input shards and write its output shards.

    The input layout is the previous stage's `after` (the plan's `src` for the first), the output layout is
    `after`. With `in_place` both are the same buffer, and what no step writes stays. `after` says which
    region a rank's buffer covers; copies that a Split* operator left out get their values in the next stage.
    """

    after: Annotation
    steps: tuple[Step, ...]
    in_place: bool = False


@dataclass(frozen=True)
class CommPlan:
    """The communication that turns `src` into `dst`; its effect on `src` is exactly `dst`.

    `operators` names what each subgroup of `dst` does in the paper's words, `label` joins them with '|' where
    they differ. Without stages every rank of `dst` keeps its buffer.
    """

    src: Annotation
    dst: Annotation
    stages: tuple[Stage, ...]
    operators: tuple[str, ...]

    @cached_property
    def label(self) -> str:
        """One name for the whole plan, e.g. 'SR', 'AR+SplitAR', 'Identity|BSR'."""
        return join_operators(self.operators)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds the tensor before or after, ascending."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    def for_rank(self, rank: int) -> tuple[Stage, ...]:
        """The same stages with only the steps that `rank` takes part in."""
        return self._by_rank.get(rank, tuple(Stage(stage.after, (), stage.in_place) for stage in self.stages))

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Stage, ...]]:
        found: dict[int, list[list[Step]]] = {rank: [[] for _ in self.stages] for rank in self.ranks}
        for index, stage in enumerate(self.stages):
            for step in stage.steps:
                for rank in step.ranks:
                    found[rank][index].append(step)
        return {
            rank: tuple(
                Stage(stage.after, tuple(own), stage.in_place)
                for stage, own in zip(self.stages, steps, strict=True)
            )
            for rank, steps in found.items()
        }

    def bytes_sent(self, shape: tuple[int, ...], itemsize: int) -> dict[int, int]:
        """Bytes that every rank of the plan sends for a tensor of the global `shape`.

        A reduce_scatter sends the other ranks' pieces, an all_gather its own piece to every other rank, an
        all_reduce does both over even pieces, rounded up.
        """
        sent = dict.fromkeys(self.ranks, 0)
        for stage in self.stages:
            for step in stage.steps:
                if isinstance(step, Transfer):
                    sent[step.src] += numel(step.region, shape) * itemsize
                elif isinstance(step, Collective):
                    whole, count = numel(step.region, shape), len(step.ranks)
                    for rank in step.ranks:
                        if step.kind == "all_reduce":
                            elements = -(-2 * (count - 1) * whole // count)
                        elif step.kind == "reduce_scatter":
                            elements = whole - numel(step.piece(rank), shape)
                        else:
                            elements = numel(step.piece(rank), shape) * (count - 1)
                        sent[rank] += elements * itemsize
        return sent

    def __str__(self) -> str:
        lines = [f"{self.label}: {self.src} -> {self.dst}"]
        for number, stage in enumerate(self.stages):
            lines.append(f"  stage {number}{' in place' if stage.in_place else ''}")
            lines += [f"    {describe(step)}" for step in stage.steps]
        return "\n".join(lines)


def describe(step: Step) -> str:
    """One line of text for a step."""
    if isinstance(step, Copy):
        return f"copy {step.rank} {step.region}"
    if isinstance(step, Transfer):
        return f"transfer {step.src} -> {step.dst} {step.region}"
    return f"{step.kind} {step.ranks} {step.region}" + ("" if step.dim is None else f" along dim {step.dim}")


def join_operators(operators: Sequence[str]) -> str:
    """One name when all subgroups do the same, else their names with '|' between."""
    return operators[0] if len(set(operators)) == 1 else "|".join(operators)


Phase = tuple[tuple[str, ...], tuple[Stage, ...]]
"""Part of a plan: its operator in every subgroup, and its stages."""


def one_stage(before: Annotation, after: Annotation, steps: Sequence[Step]) -> tuple[Stage, ...]:
    """One stage: in place, without copies, when no rank's region changes; none when nothing is left."""
    in_place = all(
        before.subgroup_of(rank) is not None and before.region(rank) == after.region(rank)
        for rank in after.ranks
    )
    if in_place:
        steps = [step for step in steps if not isinstance(step, Copy)]
    return (Stage(after, tuple(steps), in_place),) if steps else ()
