"""A parallel strategy as people write it: pipelines of stages of ranks (paper Tables 9-16)."""

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_megatron.errors import StrategyError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a strategy has to fit: depth, head counts, and the sizes that tensor parallelism cuts."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its ranks (one tensor-parallel group per context-parallel part) and its layers.

    `layers` is [first, last], inclusive, or None for a stage that holds only the embedding or only the head.
    `tp` 0 means all ranks of a context-parallel part.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int] | None
    tp: int = 0
    cp: int = 1

    @property
    def tensor_parallel_size(self) -> int:
        """Tensor-parallel degree of this stage."""
        return self.tp or max(1, len(self.ranks) // self.cp)

    @property
    def layer_numbers(self) -> range:
        """The global layer numbers of this stage."""
        return range(self.layers[0], self.layers[1] + 1) if self.layers else range(0)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and how many micro-batches of at most how many packed rows run through them each step."""

    micro_batches: int
    micro_batch_size: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which ranks do what: pipelines side by side, each a full copy of the model.

    `sequence_parallel` splits tokens over the tensor-parallel ranks between the blocks (AG / RS instead of AR),
    as the paper does. `idle_ranks` are ranks of the cluster that are deliberately left out.
    """

    pipelines: tuple[Pipeline, ...]
    zero: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    idle_ranks: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All working ranks, ascending."""
        return tuple(sorted(rank for p in self.pipelines for stage in p.stages for rank in stage.ranks))

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
        if self.zero != 0:
            raise StrategyError(
                f"zero is {self.zero}: optimizer states are not sharded yet, and a setting that does nothing would "
                "mislead; use zero 0"
            )
        for number, pipeline in enumerate(self.pipelines):
            _check_pipeline(number, pipeline, facts)
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
    _check_layers(name, pipeline, facts.num_layers)


def _check_layers(name: str, pipeline: Pipeline, num_layers: int) -> None:
    """Every layer exactly once and in order."""
    expected = 0
    seen: dict[int, int] = {}
    for s, stage in enumerate(pipeline.stages):
        if stage.layers is None:
            continue
        first, last = stage.layers
        if first > last or first < 0:
            raise StrategyError(
                f"{name} stage {s}: layers {first}-{last} are out of order: write first-last, from 0"
            )
        if last >= num_layers:
            raise StrategyError(
                f"{name} stage {s}: layer {last} is beyond the model, which has layers 0-{num_layers - 1}"
            )
        for layer in stage.layer_numbers:
            if layer in seen:
                raise StrategyError(
                    f"{name}: layer {layer} is doubled: in stage {seen[layer]} and in stage {s}"
                )
            seen[layer] = s
        if first < expected:
            raise StrategyError(
                f"{name} stage {s}: layer {first} is out of order: stage {s - 1} already ends at {expected - 1}"
            )
        expected = last + 1
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
    if stage.cp != 1:
        raise StrategyError(f"{name}: cp {stage.cp}; context parallelism is not built yet, use cp 1")
    tp = stage.tensor_parallel_size
    if tp * stage.cp != len(stage.ranks):
        raise StrategyError(
            f"{name}: tp {tp} x cp {stage.cp} needs {tp * stage.cp} ranks, "
            f"but rank list {list(stage.ranks)} has {len(stage.ranks)}"
        )
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
