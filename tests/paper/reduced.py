"""A recipe at reduced width and depth: the same ranks, degrees, stages and unequal splits, small enough for a CPU.

Every run of layers between two neighbouring stage borders of any pipeline keeps at least one layer, so every stage
keeps a layer, and borders that differ between pipelines still differ.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.recipe import Recipe
from hetero_megatron.strategy import Layers, Pipeline, Recompute, Stage, Strategy
from tests.distributed.training import Document, StepData, sequences

HIDDEN, VOCABULARY = 32, 96
SHORTEST, LONGEST = 8, 16
"""Tokens of a row."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A strategy, a model that it fits, and how many rows a step has."""

    strategy: Strategy
    config: LlamaConfig
    rows: int

    def steps(self, count: int) -> tuple[StepData, ...]:
        """Rows of unequal length, one document each."""
        documents = iter(sequences(count * self.rows, LONGEST, VOCABULARY))
        return tuple(tuple(_cut(next(documents), n + s) for n in range(self.rows)) for s in range(count))


def essence(reduced: Reduced) -> tuple[object, ...]:
    """What a strategy asks of the runtime, whatever the counts of ranks, stages and micro-batches are.

    The degrees of its stages; whether there are several pipelines, and of unequal depth or micro-batches; several
    stages, and of unequal numbers of layers; ZeRO-1, recomputation, the kind of context parallelism, shared kv heads.
    """
    strategy, config = reduced.strategy, reduced.config
    pipelines = strategy.pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    depths = {len(pipeline.stages) for pipeline in pipelines}
    return (
        frozenset(stage.tensor_parallel_sizes for stage in stages),
        (len(pipelines) > 1, len(depths) > 1, len({pipeline.micro_batches for pipeline in pipelines}) > 1),
        (max(depths) > 1, len({len(stage.layer_numbers) for stage in stages}) > 1),
        (strategy.zero, strategy.schedule, strategy.sequence_parallel, strategy.context_parallel),
        frozenset((stage.recompute, stage.offload) for stage in stages),
        config.num_attention_heads // config.num_query_groups,
    )


def _cut(document: Document, number: int) -> Document:
    """Lengths go through 8 to 16 in an order in which neighbours differ."""
    return document[: SHORTEST + 5 * number % (LONGEST - SHORTEST + 1)]


def reduce(recipe: Recipe) -> Reduced:
    """The recipe's strategy for a small model; micro-batch counts shrink in order, 33 and 31 to 3 and 2."""
    whole, config = recipe.make_strategy(), recipe.make_config()
    border = _borders(whole, config.num_layers)
    counts = sorted({pipeline.micro_batches for pipeline in whole.pipelines})
    pipelines = tuple(
        Pipeline(
            min(pipeline.micro_batches, 2 + counts.index(pipeline.micro_batches)),
            min(pipeline.micro_batch_size, 2),
            tuple(_stage(stage, border) for stage in pipeline.stages),
        )
        for pipeline in whole.pipelines
    )
    strategy = replace(whole, pipelines=pipelines)
    return Reduced(
        strategy,
        _config(config, whole, max(border.values())),
        _rows(whole, strategy, recipe.training.global_batch_size),
    )


def _borders(strategy: Strategy, num_layers: int) -> dict[int, int]:
    """New first layer by old first layer, over all pipelines; the runs between keep their proportions roughly.

    About a layer for each stage of the deepest pipeline, more where borders of several pipelines need them.
    """
    layers = max(2, *(len(pipeline.stages) for pipeline in strategy.pipelines))
    spans = [chunk for p in strategy.pipelines for stage in p.stages for chunk in stage.chunks]
    borders = sorted({0, num_layers, *(first for first, _ in spans)})
    sizes = [max(1, round((end - first) * layers / num_layers)) for first, end in pairwise(borders)]
    return dict(zip(borders, accumulate(sizes, initial=0), strict=True))


def _stage(stage: Stage, border: dict[int, int]) -> Stage:
    def moved(chunk: Layers) -> Layers:
        return border[chunk[0]], border[chunk[1] + 1] - 1

    chunks = tuple(map(moved, stage.chunks))
    recompute = tuple(
        Recompute(entry.kind, entry.layers and moved(entry.layers)) for entry in stage.recompute
    )
    layers = None if not chunks else chunks[0] if len(chunks) == 1 else chunks
    return replace(stage, layers=layers, recompute=recompute)


def _config(config: LlamaConfig, strategy: Strategy, num_layers: int) -> LlamaConfig:
    """As few heads as the degrees allow, twice as many as kv heads where the whole model shares them."""
    stages = [stage for pipeline in strategy.pipelines for stage in pipeline.stages]
    over_heads = [
        size * (stage.context_parallel_size if strategy.context_parallel == "ulysses" else 1)
        for stage in stages
        for size in stage.tensor_parallel_sizes
    ]
    groups = math.lcm(*over_heads)
    heads = groups * min(2, config.num_attention_heads // config.num_query_groups)
    hidden = max(HIDDEN, 2 * heads)
    return LlamaConfig(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=VOCABULARY,
    )


def _rows(whole: Strategy, strategy: Strategy, global_batch_size: int) -> int:
    """As full as in the whole recipe, and a row for every micro-batch."""
    counts = sum(pipeline.micro_batches for pipeline in strategy.pipelines)
    return max(counts, strategy.rows_per_step * global_batch_size // whole.rows_per_step)
