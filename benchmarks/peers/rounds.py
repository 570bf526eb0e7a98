"""One layout: both sides on the same forked ranks, steps of one side while the other one rests, and the GEMM limit."""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peers.case import Case, Layout
from benchmarks.peers.ours import Ours
from benchmarks.peers.torch_native import TorchNative
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks
from hetero_megatron.runtime.world import World

DIGITS = 5


class LossesDiffer(AssertionError):
    """The two sides do not train the same model."""


@dataclass
class Measured:
    """What rank 0 saw, a number per round.

    Attributes:
        seconds: of one step, by side: the median of the round's steps, from barrier to barrier.
        cpu_seconds: of one step, by side: processor time of all ranks together.
        limit: GFLOP/s of matrix products at the model's shapes, all cores in use together.
        parts: where our step goes, seconds of one step by kind, average of the ranks.
        losses: of every step, ours and theirs.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "theirs": []})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "theirs": []})
    limit: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)


def measure(
    case: Case,
    layout: Layout,
    rounds: int,
    steps: int,
    sequence_parallel: bool,
    gemm_seconds: float = 0.3,
) -> Measured:
    """Run one layout on processes of its own, one thread each; `gemm_seconds` a round go into the limit.

    Raises:
        LossesDiffer: in some step the losses of the two sides differ in the first 5 digits.
        RuntimeError: a rank failed; it has said why.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured.json"

        def main(rendezvous: Rendezvous) -> None:
            world = World.join(rendezvous, range(layout.ranks), torch.device("cpu"))
            ours = Ours(case, layout, world, sequence_parallel)
            found = _on_rank(case, world, ours, TorchNative(case, layout), (rounds, steps), gemm_seconds)
            if world.rank == 0:
                result.write_text(json.dumps(asdict(found)), encoding="utf-8")
            dist.barrier()
            world.leave()

        if code := fork_ranks(layout.ranks, main):
            raise RuntimeError(f"{layout.name}: a rank ended with exit code {code}")
        measured = Measured(**json.loads(result.read_text(encoding="utf-8")))
    check_losses(layout, measured.losses)
    return measured


def check_losses(layout: Layout, losses: list[tuple[float, float]]) -> None:
    """Refuse sides whose losses differ by more than half a unit of the fifth digit."""
    for step, (ours, theirs) in enumerate(losses):
        unit = 10.0 ** (math.floor(math.log10(abs(theirs))) - DIGITS + 1) if theirs else 0.0
        if not abs(ours - theirs) <= 0.5 * unit:
            raise LossesDiffer(
                f"{layout.name}, step {step}: our loss is {ours:.7f}, theirs {theirs:.7f}; "
                f"they must be equal to {DIGITS} digits, or the two sides do not train the same model"
            )


def _on_rank(
    case: Case, world: World, ours: Ours, theirs: TorchNative, counts: tuple[int, int], gemm_seconds: float
) -> Measured:
    rounds, steps = counts
    our_batches, their_batches = ours.batches(case.rows()), theirs.batches(case.rows())
    sides = {"ours": lambda: ours.step(our_batches), "theirs": lambda: theirs.step(their_batches)}
    found, warm_up = Measured(), Measured()
    for number in range(rounds + 1):
        into = found if number else warm_up
        losses = {}
        for side in sides if number % 2 else reversed(sides):
            losses[side] = _run(sides[side], side, steps, into)
        agreed = theirs.mean_loss(torch.tensor(losses["theirs"], dtype=torch.float64)).tolist()
        found.losses += list(zip(losses["ours"], agreed, strict=True))
        into.parts.append(dict(ours.seconds))
        into.limit.append(gemm_limit(case, world, gemm_seconds))
    return found


def _run(step: Callable[[], float], side: str, steps: int, into: Measured) -> list[float]:
    """Some steps of one side; its losses on this rank."""
    losses, seconds = [], []
    cpu_began = time.process_time()
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        losses.append(step())
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    cpu = torch.tensor([time.process_time() - cpu_began], dtype=torch.float64)
    dist.all_reduce(cpu)
    into.seconds[side].append(statistics.median(seconds))
    into.cpu_seconds[side].append(float(cpu) / steps)
    return losses


def gemm_limit(case: Case, world: World, duration: float) -> float:
    """GFLOP/s of the model's matrix products, forward and both backward ones, weighted by their FLOPs.

    As many ranks as there are cores multiply at the same time, and their rates are added.
    """
    c = case.config
    products = [
        (2 * c.num_layers, c.hidden_size, c.query_size),
        (2 * c.num_layers, c.hidden_size, c.kv_size),
        (3 * c.num_layers, c.hidden_size, c.ffn_hidden_size),
        (1, c.hidden_size, c.vocab_size),
    ]
    rate = torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    if world.rank < cores():
        seconds, work = 0.0, 0.0
        for count, inputs, outputs in products:
            each = _product_seconds(case.sequence, inputs, outputs, duration / len(products))
            seconds += count * each
            work += count * 6.0 * case.sequence * inputs * outputs
        rate += work / seconds / 1e9
    dist.all_reduce(rate)
    return float(rate)


def _product_seconds(tokens: int, inputs: int, outputs: int, duration: float) -> float:
    """Median seconds of y = x W^T, dx = dy W and dW = dy^T x together."""
    x, weight, dy = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
    seconds: list[float] = []
    while sum(seconds) < duration:
        began = time.perf_counter()
        torch.mm(x, weight.T, out=y)
        torch.mm(dy, weight, out=dx)
        torch.mm(dy.T, x, out=dw)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
