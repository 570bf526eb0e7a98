"""Before the first send of a step, the ranks of a pipeline compare the micro-batches they are about to run.

Before the first step all ranks compare the kernels they have chosen. Sizes are derived on every rank; if two ranks of
a pipeline derived other ones, a step would hang or mix data.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.world import Groups, World


def agree_on_micro_batches(
    program: Program, world: World, groups: Groups, batches: Sequence[MicroBatch]
) -> None:
    """Raise on every rank of the pipeline when counts, token totals or sizes differ between its stages.

    Raises:
        RuntimeFailure: naming the pipeline, the two stages, and both numbers.
    """
    pipeline, members = program.pipeline_of(world.rank)
    if len(members) == 1:
        return
    lengths = [batch.segments.tokens for batch in batches]
    borders = repr([batch.segments.cu_seqlens for batch in batches]).encode()
    mine = torch.tensor([len(batches), sum(lengths), zlib.crc32(borders)], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in members]
    dist.all_gather(found, mine, group=groups.control(members))
    for what, place in (("micro-batches", 0), ("tokens", 1), ("document borders (checksum)", 2)):
        values = [int(row[place]) for row in found]
        if len(set(values)) > 1:
            other = next(i for i, value in enumerate(values) if value != values[0])
            raise RuntimeFailure(
                f"pipeline {pipeline} disagrees on {what}: stage {program.stage_of(members[0])} "
                f"(rank {members[0]}) has {values[0]}, stage {program.stage_of(members[other])} "
                f"(rank {members[other]}) has {values[other]}; nothing was sent"
            )


def agree_on_kernels(world: World, names: Mapping[str, str]) -> None:
    """Raise on every rank when one has chosen another kernel than the first: copies of a weight would drift apart.

    Raises:
        RuntimeFailure: naming the operator, two ranks, and what each has chosen.
    """
    if len(world.ranks) == 1:
        return
    found: list[dict[str, str]] = [{} for _ in world.ranks]
    dist.all_gather_object(found, dict(names), group=world.control)
    for op, first in found[0].items():
        for rank, theirs in zip(world.ranks, found, strict=True):
            if theirs[op] != first:
                raise RuntimeFailure(
                    f"kernels.{op}: rank {world.ranks[0]} has chosen {first}, rank {rank} has chosen {theirs[op]}; "
                    "install the same libraries on all machines, or name one kernel in the recipe"
                )
