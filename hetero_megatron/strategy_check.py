"""What a strategy must be to fit its model and its cluster; `Strategy.check` is the entry (paper Tables 9-16)."""

from typing import TYPE_CHECKING

from hetero_megatron.errors import ScheduleError, StrategyError
from hetero_megatron.pipeline.schedule import check_name, shape

if TYPE_CHECKING:
    from hetero_megatron.strategy import ModelFacts, Pipeline, Stage, Strategy

CONTEXT_PARALLEL = ("ring", "ulysses")
RECOMPUTE = ("full", "selective")


def check(strategy: "Strategy", facts: "ModelFacts", cluster_ranks: tuple[int, ...]) -> None:
    """Refuse a strategy that does not fit the model or the cluster.

    Raises:
        StrategyError: naming the pipeline, stage, rank or layer, the numbers, and what would be right.
    """
    if not strategy.pipelines:
        raise StrategyError("the strategy has no pipeline")
    if strategy.zero not in (0, 1):
        raise StrategyError(
            f"zero is {strategy.zero}; 0 keeps optimizer states whole, 1 shards them (ZeRO-1)"
        )
    if strategy.context_parallel not in CONTEXT_PARALLEL:
        raise StrategyError(
            f"context_parallel is {strategy.context_parallel!r}; known: {', '.join(CONTEXT_PARALLEL)}"
        )
    for number, pipeline in enumerate(strategy.pipelines):
        _check_pipeline(number, pipeline, facts)
        if strategy.context_parallel == "ulysses":
            _check_ulysses(number, pipeline, facts)
    if strategy.schedule_tasks:
        _check_tasks(strategy)
    else:
        _check_schedule(strategy)
    _check_ranks(strategy, cluster_ranks)


def _check_ranks(strategy: "Strategy", cluster_ranks: tuple[int, ...]) -> None:
    place: dict[int, str] = {}
    known = set(cluster_ranks)
    for p, pipeline in enumerate(strategy.pipelines):
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
    for rank in strategy.idle_ranks:
        if rank in place:
            raise StrategyError(f"rank {rank} is listed in idle_ranks and used in {place[rank]}")
        if rank not in known:
            raise StrategyError(
                f"rank {rank} of idle_ranks is not in the cluster, which has {len(known)} ranks "
                f"({min(known)} to {max(known)})"
            )
    left = sorted(known - set(place) - set(strategy.idle_ranks))
    if left:
        raise StrategyError(
            f"rank {left[0]} is in no pipeline (left over: {left}); use it, or list it under strategy.idle_ranks"
        )


def _check_pipeline(number: int, pipeline: "Pipeline", facts: "ModelFacts") -> None:
    name = f"pipeline {number}"
    if pipeline.micro_batches < 0 or pipeline.micro_batch_size < 1:
        raise StrategyError(
            f"{name}: {pipeline.micro_batches} micro-batches of size {pipeline.micro_batch_size}; "
            "the count must be 0 or more and the size 1 or more"
        )
    if pipeline.max_tokens is not None and pipeline.max_tokens < 1:
        raise StrategyError(
            f"{name}: max_tokens is {pipeline.max_tokens}; a micro-batch holds 1 token or more"
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


def _check_ulysses(number: int, pipeline: "Pipeline", facts: "ModelFacts") -> None:
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


def _check_schedule(strategy: "Strategy") -> None:
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


def _check_tasks(strategy: "Strategy") -> None:
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


def _check_chunks(name: str, pipeline: "Pipeline") -> None:
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


def _check_layers(name: str, pipeline: "Pipeline", num_layers: int) -> None:
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


def _check_stage(name: str, stage: "Stage", facts: "ModelFacts") -> None:
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


def _check_recompute(name: str, stage: "Stage") -> None:
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


def _check_tensor_parallel(name: str, tp: int, facts: "ModelFacts") -> None:
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
