"""A parallel strategy as people write it: pipelines of stages of ranks (paper Tables 9-16)."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, lcm

from hetero_megatron.pipeline.schedule import Tasks
from hetero_megatron.strategy_check import check


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a strategy has to fit: depth, head counts, the sizes that tensor parallelism cuts, and the tie.

    `tie_word_embeddings`: the head uses the embedding's weight, so that the last stage holds it too.
    """

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool = False


Layers = tuple[int, int]
"""First and last layer, inclusive."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations are computed again in the backward pass instead of kept (Megatron's recomputation).

    `full` keeps only the input of each layer; `selective` keeps all but the core attention and the gate of the
    feed-forward block. `layers` None means all layers of the stage.
    """

    kind: str
    layers: Layers | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its ranks and its layers.

    The ranks are `cp` context-parallel parts one after the other, and each part is a tensor-parallel group.

    Attributes:
        layers: [first, last]; several of them, one per chunk, under an interleaved schedule; or None for a stage
            that holds only the embedding or only the head.
        tp: 0 for all ranks of a part; one degree per part where parts differ (paper Figure 4).
        cp: how many ranks share the tokens of one sequence.
        recompute: at most one entry per layer.
        offload: keep activations in host memory between forward and backward.
    """

    ranks: tuple[int, ...]
    layers: Layers | tuple[Layers, ...] | None
    tp: int | tuple[int, ...] = 0
    cp: int = 1
    recompute: tuple[Recompute, ...] = ()
    offload: bool = False

    @property
    def context_parallel_size(self) -> int:
        """Number of context-parallel parts."""
        return len(self.tp) if isinstance(self.tp, tuple) else self.cp

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel degree of each context-parallel part."""
        if isinstance(self.tp, tuple):
            return self.tp
        return (self.tp or max(1, len(self.ranks) // self.cp),) * self.cp

    @property
    def tensor_parallel_size(self) -> int:
        """The largest tensor-parallel degree."""
        return max(self.tensor_parallel_sizes)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each context-parallel part."""
        ends = list(accumulate(self.tensor_parallel_sizes, initial=0))
        return tuple(self.ranks[first:end] for first, end in pairwise(ends))

    @property
    def chunks(self) -> tuple[Layers, ...]:
        """The layer ranges: one, several under an interleaved schedule, or none."""
        if self.layers is None:
            return ()
        if isinstance(self.layers[0], int):
            return (self.layers,)
        return self.layers

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The global layer numbers of this stage."""
        return tuple(layer for first, last in self.chunks for layer in range(first, last + 1))

    def recompute_of(self, layer: int) -> str:
        """`full`, `selective` or `none` for one of this stage's layers."""
        for entry in self.recompute:
            if entry.layers is None or entry.layers[0] <= layer <= entry.layers[1]:
                return entry.kind
        return "none"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and how many micro-batches of at most how many packed rows run through them each step.

    `max_tokens` is the most tokens of a micro-batch where documents are packed: a pipeline for short documents
    holds less than a row of the longest ones.
    """

    micro_batches: int
    micro_batch_size: int
    stages: tuple[Stage, ...]
    max_tokens: int | None = None

    def tokens(self, seq_length: int) -> int:
        """Most tokens of a micro-batch."""
        rows = self.micro_batch_size * seq_length
        return rows if self.max_tokens is None else min(self.max_tokens, rows)

    @property
    def context_parallel_size(self) -> int:
        """Context-parallel parts, the same number on every stage."""
        return self.stages[0].context_parallel_size

    @property
    def chunks(self) -> int:
        """Layer ranges of each stage: the virtual pipeline size, 1 unless the schedule interleaves."""
        return max((1, *(len(stage.chunks) for stage in self.stages)))

    @property
    def token_shares(self) -> tuple[int, ...]:
        """What share of the tokens each context-parallel part takes: by its ranks over all stages."""
        each = zip(*(stage.tensor_parallel_sizes for stage in self.stages), strict=True)
        sums = [sum(sizes) for sizes in each]
        return tuple(share // gcd(*sums) for share in sums)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which ranks do what: pipelines side by side, each a full copy of the model.

    `zero` 1 shards FP32 master weights and moments over the pipelines' context-parallel parts (ZeRO-1).
    `sequence_parallel` splits tokens over the tensor-parallel ranks between the blocks (AG / RS instead of AR),
    as the paper does. `context_parallel` is how parts share attention: `ring` passes keys and values around,
    `ulysses` exchanges tokens for heads. `offload_optimizer` keeps optimizer states in host memory.
    `idle_ranks` are ranks of the cluster that are deliberately left out. `schedule` is a name in
    `pipeline.schedule.SCHEDULES`, for all pipelines; or with `schedule_tasks`, the compute actions of every stage of
    every pipeline, the name of the file that they were read from.
    """

    pipelines: tuple[Pipeline, ...]
    zero: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    idle_ranks: tuple[int, ...] = ()
    context_parallel: str = "ring"
    offload_optimizer: bool = False
    schedule_tasks: tuple[Tasks, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All working ranks, ascending."""
        return tuple(sorted(rank for p in self.pipelines for stage in p.stages for rank in stage.ranks))

    @property
    def has_ring(self) -> bool:
        """Whether some pipeline passes keys and values around."""
        return self.context_parallel == "ring" and any(p.context_parallel_size > 1 for p in self.pipelines)

    @property
    def rows_per_step(self) -> int:
        """The most packed rows that one step can take."""
        return sum(p.micro_batches * p.micro_batch_size for p in self.pipelines)

    def token_multiple(self, pipeline: int, part: int | None = None) -> int:
        """What a part's tokens of a micro-batch must divide by: sequence parallelism cuts them over every stage's TP.

        Without `part`, what a whole micro-batch is padded to: several parts pad their own tokens each.
        """
        stages = self.pipelines[pipeline].stages
        if not self.sequence_parallel or (part is None and stages[0].context_parallel_size > 1):
            return 1
        return lcm(*(stage.tensor_parallel_sizes[part or 0] for stage in stages))

    def check(self, facts: ModelFacts, cluster_ranks: Iterable[int]) -> None:
        """Refuse a strategy that does not fit the model or the cluster.

        Raises:
            StrategyError: naming the pipeline, stage, rank or layer, the numbers, and what would be right.
        """
        check(self, facts, tuple(cluster_ranks))
