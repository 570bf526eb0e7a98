"""Communication resolution: from two annotations to the steps that every rank takes (paper §5)."""

from hetero_megatron.comm.bsr import (
    ALGORITHMS,
    Algorithm,
    BsrCopy,
    BsrScheme,
    BsrTensor,
    BsrTransfer,
    Slice,
    bsr_table,
    schedule_transfers,
)
from hetero_megatron.comm.interpret import assemble, interpret, shard
from hetero_megatron.comm.resolve import resolve
from hetero_megatron.comm.steps import Collective, CommPlan, Copy, Stage, Step, Transfer

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BsrCopy",
    "BsrScheme",
    "BsrTensor",
    "BsrTransfer",
    "Collective",
    "CommPlan",
    "Copy",
    "Slice",
    "Stage",
    "Step",
    "Transfer",
    "assemble",
    "bsr_table",
    "interpret",
    "resolve",
    "schedule_transfers",
    "shard",
]
