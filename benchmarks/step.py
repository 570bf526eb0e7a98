"""One rank's training step against the same Llama in plain PyTorch eager: what the library costs when nothing is parallel.

    python benchmarks/step.py [--steps 20] [--precision fp32|bf16]

Both run in one process with one thread under SCHED_BATCH, steps in turn, the same tokens and the same optimizer
arithmetic (fused AdamW). Prints the median of the paired ratios ours / plain; below 1 is faster.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_megatron.cluster import Cluster
from hetero_megatron.data.batch import pack
from hetero_megatron.data.rows import Piece
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.launch import Rendezvous, use_batch_scheduling
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

CONFIG = LlamaConfig(8, 256, 688, 4, 4, 4096)
SEQUENCE, MICRO_BATCHES = 256, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PlainBlock(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(c.hidden_size, c.hidden_size, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(c.hidden_size, c.ffn_hidden_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.ffn_hidden_size, c.hidden_size, bias=False)
        self.norm1, self.norm2 = (
            nn.RMSNorm(c.hidden_size, eps=c.norm_eps),
            nn.RMSNorm(c.hidden_size, eps=c.norm_eps),
        )
        self.head_size = c.head_size

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(b, t, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class PlainLlama(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.num_layers))
        self.norm, self.head = (
            nn.RMSNorm(c.hidden_size, eps=c.norm_eps),
            nn.Linear(c.hidden_size, c.vocab_size, bias=False),
        )
        f = torch.outer(
            torch.arange(SEQUENCE).float(), c.rope_theta ** (-torch.arange(0, c.head_size, 2) / c.head_size)
        )
        self.register_buffer("cos", f.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", f.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embedding(tokens)
        cos, sin = self.cos.to(h.dtype), self.sin.to(h.dtype)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), targets.flatten())


def ours(precision: str, tokens: Tensor) -> tuple[Session, list[MicroBatch]]:
    strategy = Strategy((Pipeline(MICRO_BATCHES, 1, (Stage((0,), (0, CONFIG.num_layers - 1)),)),))
    model = Llama(CONFIG)
    program = Program.build(trace(model), strategy, CONFIG.facts, Cluster.local_cpu(1))
    store = tempfile.NamedTemporaryFile()  # noqa: SIM115  # lives as long as the process
    world = World.join(Rendezvous(0, 1, store.name + ".store"), (0,), torch.device("cpu"))
    specs = initial_values(model)
    session = Session(
        program,
        world,
        dict(model.named_modules()),
        lambda slot: initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, 0),
        OptimizerSettings(lr=1e-3, train_iters=10**6),
        DTYPES[precision],
    )
    return session, [pack([Piece(0, row[:-1].numpy(), row[1:].numpy())]) for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    use_batch_scheduling()
    tokens = torch.randint(
        CONFIG.vocab_size, (MICRO_BATCHES, SEQUENCE + 1), generator=torch.Generator().manual_seed(0)
    )
    session, batches = ours(arguments.precision, tokens)

    plain = PlainLlama(CONFIG).to(DTYPES[arguments.precision])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0, fused=True)

    def plain_step() -> None:
        for row in tokens:
            (plain(row[None, :-1], row[None, 1:]) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    def our_step() -> None:
        session.step(batches)

    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(arguments.steps + 2):
        order = [("ours", our_step), ("plain", plain_step)]
        for name, step in order if number % 2 else order[::-1]:
            began = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    for name, times in seconds.items():
        median = statistics.median(times)
        rate = MICRO_BATCHES * SEQUENCE / median
        print(f"{name:6} {1e3 * median:8.1f} ms median of {len(times)}, {rate:.0f} tokens/s")
    print(
        f"ratio ours / plain: median {statistics.median(ratios):.4f}, from {min(ratios):.4f} to {max(ratios):.4f}"
    )
    session.world.leave()


if __name__ == "__main__":
    main()
