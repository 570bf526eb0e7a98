"""What both sides train: one small Llama, one set of rows, and the layouts of their ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_megatron.models.config import LlamaConfig

LLAMA = LlamaConfig(
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=688,
    num_attention_heads=4,
    num_query_groups=4,
    vocab_size=4096,
)
LR, SEED = 1e-3, 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipeline stages x data-parallel copies x tensor-parallel ranks, all of the same size."""

    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("1 rank"),
        Layout("PP2", pp=2),
        Layout("DP2", dp=2),
        Layout("DP2xPP2", pp=2, dp=2),
        Layout("TP2", tp=2),
        Layout("PP2xTP2", pp=2, tp=2),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a step's data: `micro_batches` rows of `sequence` tokens, a row per micro-batch."""

    config: LlamaConfig = LLAMA
    sequence: int = 256
    micro_batches: int = 16

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.micro_batches

    def rows(self) -> Tensor:
        """[micro-batches, sequence + 1] ids, the same ones in every step; a target is the next id."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.micro_batches, self.sequence + 1)
        return torch.randint(self.config.vocab_size, shape, generator=generator)
