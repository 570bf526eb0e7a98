"""The strategy for those who are left: the one that was written, without the ranks that are not there.

A simple rule, for when no planner is asked: nothing moves that need not. It may leave survivors idle.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import StrategyError
from hetero_megatron.strategy import Layers, ModelFacts, Pipeline, Strategy

PLAIN_SCHEDULES = ("gpipe", "1f1b")


def shrink(strategy: Strategy, facts: ModelFacts, ranks: Collection[int]) -> Strategy:
    """`strategy` on those of its ranks that are among `ranks`; the others of `ranks` are idle.

    A stage that has lost a rank takes the largest tensor-parallel degree that fits the model. A stage that has lost all
    gives its layers to its neighbours, a pipeline that has lost all its rows to the others: a step has as many as before.

    Raises:
        StrategyError: no rank of the strategy is left.
    """
    there = set(ranks)
    lost = set(strategy.ranks) - there
    plain = strategy
    if lost and (strategy.schedule not in PLAIN_SCHEDULES or strategy.schedule_tasks):
        # A schedule of chunks, or of a file, is made for these stages and counts.
        plain = replace(
            strategy,
            schedule="1f1b",
            schedule_tasks=(),
            pipelines=tuple(_in_one_chunk(p) for p in strategy.pipelines),
        )
    pipelines: list[Pipeline] = []
    rows = 0
    for pipeline in plain.pipelines:
        left = _shrunk(pipeline, facts, there)
        if left is None:
            rows += pipeline.micro_batches * pipeline.micro_batch_size
        else:
            pipelines.append(left)
    if not pipelines:
        raise StrategyError(
            f"of the strategy's ranks {ranges_text(strategy.ranks)} none is left; there are {ranges_text(there)}"
        )
    found = replace(plain, pipelines=tuple(_with_rows(pipelines, rows)))
    return replace(found, idle_ranks=tuple(sorted(there - set(found.ranks))))


def _shrunk(pipeline: Pipeline, facts: ModelFacts, there: Collection[int]) -> Pipeline | None:
    left = [tuple(rank for rank in stage.ranks if rank in there) for stage in pipeline.stages]
    if all(own == stage.ranks for own, stage in zip(left, pipeline.stages, strict=True)):
        return pipeline
    if not any(left):
        return None
    layers = _inherited([stage.chunks for stage in pipeline.stages], [bool(own) for own in left])
    stages = []
    for own, stage, held in zip(left, pipeline.stages, layers, strict=True):
        if own:
            size = max(n for n in range(1, len(own) + 1) if _fits(n, facts))
            # What one part recomputes is no question of where its ranks are; ranges of layers are.
            recompute = tuple(replace(entry, layers=None) for entry in stage.recompute[:1])
            stages.append(replace(stage, ranks=own[:size], layers=held, tp=0, cp=1, recompute=recompute))
    return replace(pipeline, stages=tuple(stages))


def _fits(size: int, facts: ModelFacts) -> bool:
    """Whether a tensor-parallel degree divides what it cuts."""
    groups = facts.num_query_groups
    shares = groups % size == 0 or size % groups == 0
    return shares and facts.num_attention_heads % size == 0 and facts.ffn_hidden_size % size == 0


def _inherited(chunks: Sequence[tuple[Layers, ...]], left: Sequence[bool]) -> list[Layers | None]:
    """The layers of each stage once those without ranks have given theirs away, half to each side."""
    ranges = [(own[0][0], own[-1][1]) if own else None for own in chunks]
    for first, end in _runs(left):
        given = _joined(ranges[first:end])
        ranges[first:end] = [None] * (end - first)
        if given is None:
            continue
        low, high = given
        middle = high + 1 if end == len(ranges) else low if first == 0 else (low + high + 1) // 2
        if middle > low:
            ranges[first - 1] = _joined([ranges[first - 1], (low, middle - 1)])
        if middle <= high:
            ranges[end] = _joined([(middle, high), ranges[end]])
    return ranges


def _runs(left: Sequence[bool]) -> list[tuple[int, int]]:
    """[first, end) of the stages in a row that have nobody."""
    runs: list[tuple[int, int]] = []
    for place, there in enumerate(left):
        if not there and runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        elif not there:
            runs.append((place, place + 1))
    return runs


def _joined(ranges: Sequence[Layers | None]) -> Layers | None:
    both = [own for own in ranges if own is not None]
    return (both[0][0], both[-1][1]) if both else None


def _with_rows(pipelines: Sequence[Pipeline], rows: int) -> list[Pipeline]:
    """Share the rows of lost pipelines over the others, always to the one with the fewest rows for its ranks."""
    found = list(pipelines)

    def load(place: int) -> float:
        own = found[place]
        return own.micro_batches * own.micro_batch_size / sum(len(stage.ranks) for stage in own.stages)

    while rows:
        fitting = [p for p, own in enumerate(found) if own.micro_batch_size <= rows] or [0]
        place = min(fitting, key=load)
        own = found[place]
        if own.micro_batch_size > rows:
            own = replace(own, micro_batches=own.micro_batches * own.micro_batch_size, micro_batch_size=1)
        found[place] = replace(own, micro_batches=own.micro_batches + 1)
        rows -= own.micro_batch_size
    return found


def _in_one_chunk(pipeline: Pipeline) -> Pipeline:
    """Every stage with one range of layers, each with as many as before."""
    if all(len(stage.chunks) <= 1 for stage in pipeline.stages):
        return pipeline
    stages, first = [], 0
    for stage in pipeline.stages:
        count = len(stage.layer_numbers)
        layers = (first, first + count - 1) if count else None
        recompute = tuple(replace(entry, layers=None) for entry in stage.recompute[:1])
        stages.append(replace(stage, layers=layers, recompute=recompute))
        first += count
    return replace(pipeline, stages=tuple(stages))
