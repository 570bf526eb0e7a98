"""Collectives of two processes on CPUs as one message each way: for small tensors gloo's own take twice as long.

The sum of two numbers does not depend on their order, so both processes get the same bits. On a GPU, and in larger
groups, torch.distributed's collectives are used.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], None]
Combine = Callable[[Tensor, Tensor], Tensor]

# Of the larger of input and output; beyond it gloo's pipelined collectives are as fast and need no buffer.
_SMALL_BYTES = 2 << 20
# No tag of a pipeline's messages, which may travel in the same group.
_TAG = 1 << 30


def suits(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether the functions below are faster than torch.distributed for this `tensor`, the same on both processes."""
    return group.size() == 2 and tensor.device.type == "cpu" and 0 < tensor.nbytes <= _SMALL_BYTES


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, combine: Combine = Tensor.add_) -> Finish:
    """Begin to reduce a contiguous `tensor` in place; it is done when the function returned has run."""
    other = torch.empty_like(tensor)
    wait = _swap(tensor, other, group)

    def finish() -> None:
        wait()
        combine(tensor, other)

    return finish


def reduce_scatter(result: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Finish:
    """Begin to sum this process's half of the rows of `tensor` into `result`; both are contiguous."""
    halves = tensor.chunk(2)
    me = group.rank()
    wait = _swap(halves[1 - me], result, group)

    def finish() -> None:
        wait()
        result.add_(halves[me])

    return finish


def all_gather(result: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Finish:
    """Begin to put the rows of both processes' `tensor` into `result`; both are contiguous."""
    halves = result.chunk(2)
    me = group.rank()
    wait = _swap(tensor, halves[1 - me], group)
    halves[me].copy_(tensor)
    return wait


def _swap(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> Finish:
    peer = 1 - group.rank()
    sending = dist.isend(outgoing, group=group, tag=_TAG, group_dst=peer)
    receiving = dist.irecv(incoming, group=group, tag=_TAG, group_src=peer)
    assert sending is not None, "a pair's processes are members of its group"
    assert receiving is not None, "a pair's processes are members of its group"

    def wait() -> None:
        receiving.wait()
        sending.wait()

    return wait
