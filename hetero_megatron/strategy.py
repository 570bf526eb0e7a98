"""A parallel strategy as people write it: pipelines of stages of ranks (paper Tables 9-16)."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from hetero_megatron.errors import ScheduleError, StrategyError
from hetero_megatron.pipeline.schedule import Tasks, check_name, shape


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


CONTEXT_PARALLEL = ("ring", "ulysses")
RECOMPUTE = ("full", "selective")

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
    """Stages in order, and how many micro-batches of at most how many packed rows run through them each step."""

    micro_batches: int
    micro_batch_size: int
    stages: tuple[Stage, ...]

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

    def check(self, facts: ModelFacts, cluster_ranks: Iterable[int]) -> None:
        """Refuse a strategy that does not fit the model or the cluster.

        Raises:
            StrategyError: naming the pipeline, stage, rank or layer, the numbers, and what would be right.
        """
        if not self.pipelines:
            raise StrategyError("the strategy has no pipeline")
        if self.zero not in (0, 1):
            raise StrategyError(
                f"zero is {self.zero}; 0 keeps optimizer states whole, 1 shards them (ZeRO-1)"
            )
        if self.context_parallel not in CONTEXT_PARALLEL:
            raise StrategyError(
                f"context_parallel is {self.context_parallel!r}; known: {', '.join(CONTEXT_PARALLEL)}"
            )
        for number, pipeline in enumerate(self.pipelines):
            _check_pipeline(number, pipeline, facts)
            if self.context_parallel == "ulysses":
                _check_ulysses(number, pipeline, facts)
        if self.schedule_tasks:
            _check_tasks(self)
        else:
            _check_schedule(self)
        self._check_ranks(tuple(cluster_ranks))

    def _check_ranks(self, cluster_ranks: tuple[int, ...]) -> None:
        place: dict[int, str] = {}
        known = set(cluster_ranks)
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                here = f"pipeline {p} stage {s}"
                for rank in stage.ranks:
                    if rank in place:
                        raise StrategyError(f"rank {rank} is used twice: in {place[rank]} and in {here}")
                    if rank not in known:
                        raise StrategyError(
                            f"rank {rank} of {here} is not in the cluster, which has {len(known)} ranks "
                            f"({min(known)} to {max(known)})"
                        )
                    place[rank] = here
        for rank in self.idle_ranks:
            if rank in place:
                raise StrategyError(f"rank {rank} is listed in idle_ranks and used in {place[rank]}")
        left = sorted(known - set(place) - set(self.idle_ranks))
        if left:
            raise StrategyError(
                f"rank {left[0]} is in no pipeline (left over: {left}); use it, or list it under strategy.idle_ranks"
            )


def _check_pipeline(number: int, pipeline: Pipeline, facts: ModelFacts) -> None:
    name = f"pipeline {number}"
    if pipeline.micro_batches < 0 or pipeline.micro_batch_size < 1:
        raise StrategyError(
            f"{name}: {pipeline.micro_batches} micro-batches of size {pipeline.micro_batch_size}; "
            "the count must be 0 or more and the size 1 or more"
        )
    if not pipeline.stages:
        raise StrategyError(f"{name} has no stage")
    for s, stage in enumerate(pipeline.stages):
        _check_stage(f"{name} stage {s}", stage, facts)
        if stage.layers is None and 0 < s < len(pipeline.stages) - 1:
            raise StrategyError(
                f"{name} stage {s} is an empty stage between others: only the first or last may hold no layer"
            )
    _check_chunks(name, pipeline)
    _check_layers(name, pipeline, facts.num_layers)


def _check_ulysses(number: int, pipeline: Pipeline, facts: ModelFacts) -> None:
    """Heads go round over the ranks of equal place in each part."""
    for s, stage in enumerate(pipeline.stages):
        here, sizes = f"pipeline {number} stage {s}", stage.tensor_parallel_sizes
        if len(set(sizes)) > 1:
            raise StrategyError(
                f"{here}: context_parallel ulysses needs the same TP in every part, tp is {list(sizes)}; "
                "context_parallel ring takes parts of different TP"
            )
        if facts.num_attention_heads % len(stage.ranks):
            raise StrategyError(
                f"{here}: context_parallel ulysses splits {facts.num_attention_heads} attention heads over "
                f"tp {sizes[0]} x cp {len(sizes)} = {len(stage.ranks)} ranks, which must divide them; "
                "context_parallel ring has no such limit"
            )


def _check_schedule(strategy: Strategy) -> None:
    """Several layer ranges per stage and the interleaved schedule belong together, on pipelines of several stages."""
    try:
        check_name(strategy.schedule)
    except ScheduleError as error:
        raise StrategyError(str(error)) from error
    interleaves = strategy.schedule == "interleaved"
    for number, pipeline in enumerate(strategy.pipelines):
        stages, chunks = len(pipeline.stages), pipeline.chunks
        if chunks > 1 and stages == 1:
            raise StrategyError(
                f"pipeline {number} has {chunks} layer ranges on its only stage; with nobody to take turns with, "
                "write them as one range"
            )
        if chunks > 1 and not interleaves:
            raise StrategyError(
                f"pipeline {number} has {chunks} layer ranges on each stage, which schedule {strategy.schedule} "
                "cannot run; use schedule interleaved, or give each stage one range"
            )
        if interleaves and chunks == 1 and stages > 1:
            raise StrategyError(
                f"pipeline {number} has one layer range on each of {stages} stages; schedule interleaved needs 2 or "
                "more on each, such as 0-1, 4-5 (or vp, beside pp); with one range use schedule 1f1b"
            )
    if interleaves and all(len(pipeline.stages) == 1 for pipeline in strategy.pipelines):
        raise StrategyError(
            "schedule interleaved: every pipeline has one stage, so there is nothing to interleave; "
            "use schedule 1f1b"
        )


def _check_tasks(strategy: Strategy) -> None:
    """Given tasks are for these pipelines: as many stages, micro-batches and chunks."""
    given, name = strategy.schedule_tasks, strategy.schedule
    if len(given) != len(strategy.pipelines):
        raise StrategyError(
            f"schedule {name} has {len(given)} pipelines, the strategy has {len(strategy.pipelines)}"
        )
    for number, (tasks, pipeline) in enumerate(zip(given, strategy.pipelines, strict=True)):
        micro_batches, chunks = shape(tasks)
        counts = [
            ("stages", len(tasks), len(pipeline.stages)),
            ("micro-batches", micro_batches, pipeline.micro_batches),
            ("chunks per stage", chunks if micro_batches else pipeline.chunks, pipeline.chunks),
        ]
        for what, found, wanted in counts:
            if found != wanted:
                raise StrategyError(
                    f"schedule {name}: pipeline {number} has {found} {what} there and {wanted} in the strategy; "
                    "change one of the two"
                )


def _check_chunks(name: str, pipeline: Pipeline) -> None:
    """As many chunks and context-parallel parts on every stage as on the first."""
    chunks = max(len(stage.chunks) for stage in pipeline.stages)
    for s, stage in enumerate(pipeline.stages):
        if stage.chunks and len(stage.chunks) != chunks:
            raise StrategyError(
                f"{name} stage {s}: {len(stage.chunks)} layer ranges, another stage of {name} has {chunks}; "
                "an interleaved pipeline has as many on every stage"
            )
        if chunks > 1 and not stage.chunks:
            raise StrategyError(
                f"{name} stage {s} holds no layer: an interleaved pipeline needs {chunks} ranges"
            )
        if stage.context_parallel_size != pipeline.context_parallel_size:
            raise StrategyError(
                f"{name} stage {s}: cp {stage.context_parallel_size}, but stage 0 has cp "
                f"{pipeline.context_parallel_size}; a sequence is shared alike by all stages of a pipeline"
            )


def _check_layers(name: str, pipeline: Pipeline, num_layers: int) -> None:
    """Every layer exactly once, and in order: chunk by chunk through all stages."""
    walk = sorted(
        (
            (chunk, s, *layers)
            for s, stage in enumerate(pipeline.stages)
            for chunk, layers in enumerate(stage.chunks)
        )
    )
    expected, before = 0, 0
    seen: dict[int, int] = {}
    for _, s, first, last in walk:
        if first > last or first < 0:
            raise StrategyError(
                f"{name} stage {s}: layers {first}-{last} are out of order: write first-last, from 0"
            )
        if last >= num_layers:
            raise StrategyError(
                f"{name} stage {s}: layer {last} is beyond the model, which has layers 0-{num_layers - 1}"
            )
        for layer in range(first, last + 1):
            if layer in seen:
                raise StrategyError(
                    f"{name}: layer {layer} is doubled: in stage {seen[layer]} and in stage {s}"
                )
            seen[layer] = s
        if first < expected:
            raise StrategyError(
                f"{name} stage {s}: layer {first} is out of order: stage {before} already ends at {expected - 1}"
            )
        expected, before = last + 1, s
    missing = [layer for layer in range(num_layers) if layer not in seen]
    if missing:
        raise StrategyError(
            f"{name}: layer {missing[0]} is missing (layers {missing} are in no stage of {name})"
        )


def _check_stage(name: str, stage: Stage, facts: ModelFacts) -> None:
    if not stage.ranks:
        raise StrategyError(f"{name} has no rank")
    if len(set(stage.ranks)) != len(stage.ranks):
        twice = next(rank for rank in stage.ranks if stage.ranks.count(rank) > 1)
        raise StrategyError(f"rank {twice} is used twice: in {name} and in {name}")
    if stage.cp < 1:
        raise StrategyError(f"{name}: cp {stage.cp}; it counts context-parallel parts, 1 or more")
    if isinstance(stage.tp, tuple) and stage.cp not in (1, len(stage.tp)):
        raise StrategyError(f"{name}: cp {stage.cp}, but tp {list(stage.tp)} names {len(stage.tp)} parts")
    sizes = stage.tensor_parallel_sizes
    if min(sizes, default=0) < 1 or sum(sizes) != len(stage.ranks):
        told = (
            f"tp {list(sizes)}"
            if len(set(sizes)) > 1
            else f"tp {sizes[0]} x cp {len(sizes)}"
            if sizes
            else "tp []"
        )
        raise StrategyError(
            f"{name}: {told} needs {sum(sizes)} ranks, but rank list {list(stage.ranks)} has {len(stage.ranks)}"
        )
    _check_recompute(name, stage)
    for tp in sorted(set(sizes)):
        _check_tensor_parallel(name, tp, facts)


def _check_recompute(name: str, stage: Stage) -> None:
    taken: dict[int, str] = {}
    for entry in stage.recompute:
        if entry.kind not in RECOMPUTE:
            raise StrategyError(f"{name}: recompute {entry.kind!r} is unknown; known: {', '.join(RECOMPUTE)}")
        first, last = entry.layers or (
            min(stage.layer_numbers, default=0),
            max(stage.layer_numbers, default=-1),
        )
        for layer in range(first, last + 1):
            if layer not in stage.layer_numbers and entry.layers is not None:
                raise StrategyError(
                    f"{name}: recompute {entry.kind} names layer {layer}, which is not on this stage"
                )
            if layer in taken:
                raise StrategyError(
                    f"{name}: recompute names layer {layer} twice: {taken[layer]} and {entry.kind}"
                )
            taken[layer] = entry.kind


def _check_tensor_parallel(name: str, tp: int, facts: ModelFacts) -> None:
    heads, groups = facts.num_attention_heads, facts.num_query_groups
    if heads % tp:
        raise StrategyError(
            f"{name}: {heads} attention heads ({groups} kv heads) cannot be split over TP {tp}; "
            f"TP must divide {heads}"
        )
    if groups % tp and tp % groups:
        raise StrategyError(
            f"{name}: {groups} kv heads cannot be split or copied over TP {tp}; one of the two must divide the other"
        )
    for label, size in (("ffn_hidden_size", facts.ffn_hidden_size), ("vocab_size", facts.vocab_size)):
        if size < tp:
            raise StrategyError(f"{name}: {label} {size} is smaller than TP {tp}")
