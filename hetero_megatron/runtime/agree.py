"""Before the first send of a step, the ranks of a pipeline compare the micro-batches they are about to run.

Sizes are derived on every rank; if two ranks of a pipeline derived other ones, a step would hang or mix data.
"""

import zlib
from collections.abc import Sequence

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
