"""What `measure` times beside whole steps: messages and collectives, an embedding alone, weight gradients alone."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetero_megatron.planner.profiles import Transfer
from hetero_megatron.runtime.exchange import all_gather_into, all_reduce, reduce_scatter_into
from hetero_megatron.runtime.world import World

REPEATS = 5
LINEARS = ("wq", "wk", "wv", "wo", "gate", "up", "down")


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least_seconds(
    run: Callable[[], object], device: torch.device, rounds: int, before: Callable[[], object] | None = None
) -> float:
    """Least of `rounds` medians of a call's time; `before` each call something may run that is not timed."""
    found = []
    for _ in range(rounds):
        seconds = []
        for _ in range(REPEATS):
            if before is not None:
                before()
            synchronize(device)
            began = time.perf_counter()
            run()
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds))
    return min(found)


def embedding_seconds(module: nn.Module, tokens_T: Tensor, rounds: int) -> tuple[float, float]:
    """Forward and backward of an embedding on this rank's shard, its gradient added to what is there."""
    device = tokens_T.device
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [module(tokens_T)]

    forward_seconds = least_seconds(forward, device, rounds)
    gradient = torch.ones_like(kept[0])
    return forward_seconds, least_seconds(lambda: kept[0].backward(gradient), device, rounds, forward)


def weight_gradient_seconds(modules: Mapping[str, nn.Module], tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of the weight gradients of a layer, and of the head: products of local shards, added to a buffer."""
    sums = {"layer": 0.0, "head": 0.0}
    names = [("layer", f"layers.0.{name}") for name in LINEARS] + [("head", "head")]
    for unit, name in names:
        weight = modules[name].weight
        assert isinstance(weight, Tensor), f"{name} has a weight"
        dy = torch.ones(tokens, weight.shape[0], dtype=weight.dtype, device=weight.device)
        x = torch.ones(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
        into = torch.zeros_like(weight)
        with torch.no_grad():
            sums[unit] += least_seconds(lambda a=dy, b=x, c=into: c.addmm_(a.T, b), weight.device, rounds)  # type: ignore[misc]
    return sums


def transfers(world: World, link: str, sizes: Sequence[int], rounds: int) -> list[Transfer]:
    """Messages between the first two ranks, and collectives of all ranks; nothing on one rank."""
    count, found = len(world.ranks), list[Transfer]()
    if count < 2:
        return found
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    for size in sizes:
        elements = max(count, size // 4 // count * count)
        whole = torch.zeros(elements, device=world.device)
        part = torch.zeros(elements // count, device=world.device)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "p2p": (2, lambda whole=whole: _there_and_back(world, whole)),  # type: ignore[misc]
            "all_reduce": (count, lambda whole=whole: all_reduce(whole, group)),  # type: ignore[misc]
            "all_gather": (
                count,
                lambda whole=whole, part=part: all_gather_into(whole, part, group=group),  # type: ignore[misc]
            ),
            "reduce_scatter": (
                count,
                lambda whole=whole, part=part: reduce_scatter_into(part, whole, group=group),  # type: ignore[misc]
            ),
        }
        for operation, (ranks, call) in calls.items():
            dist.barrier()
            seconds = least_seconds(call, world.device, rounds)
            seconds /= 2 if operation == "p2p" else 1
            found.append(Transfer(link, operation, ranks, 4 * elements, seconds))  # type: ignore[arg-type]
    return found


def _there_and_back(world: World, tensor: Tensor) -> None:
    index = world.index(world.rank)
    if index > 1:
        return
    for sender in (0, 1):
        operation = dist.isend if index == sender else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, 1 - index)]):
            work.wait()


def reserved_bytes(device: torch.device) -> int:
    """Memory of an accelerator that is neither free nor PyTorch's: driver, context and communication library."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
