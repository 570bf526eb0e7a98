"""Random models, strategies and documents by seed, valid by construction.

A seed gives one `Case`, which can be printed and drawn again. Every feature of a strategy occurs, alone and with others:
`features` says which ones a case has.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.schedule import Tasks
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.state import BUCKET_ELEMENTS
from hetero_megatron.strategy import Layers, Pipeline, Recompute, Stage, Strategy
from tests.distributed.training import StepData

STEPS, LONGEST = 2, 20
# Attention heads and the width of one.
HEADS = ((6, 4), (6, 8), (12, 2), (12, 4), (4, 8), (8, 4))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a strategy that fits it, the lengths of the documents of each step, and how weights are updated."""

    seed: int
    config: LlamaConfig
    strategy: Strategy
    lengths: tuple[tuple[int, ...], ...]
    settings: OptimizerSettings
    bucket_elements: int

    @property
    def steps(self) -> tuple[StepData, ...]:
        """Documents of each step."""
        ids = torch.Generator().manual_seed(self.seed)

        def document(length: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, self.config.vocab_size, (length,), generator=ids).tolist())

        return tuple(tuple(map(document, step)) for step in self.lengths)


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"strategy {seed}")
    config = _config(rng)
    strategy = _strategy(rng, config)
    lengths, settings, bucket_elements = _lengths(rng, strategy), _settings(rng), _bucket_elements(rng)
    if strategy.schedule != "interleaved" and _chance(rng, 20):
        orders = tuple(_order(rng, len(each.stages), each.micro_batches) for each in strategy.pipelines)
        strategy = replace(strategy, schedule="mine.csv", schedule_tasks=orders)
    return Case(seed, _with_biases(config, seed), strategy, lengths, settings, bucket_elements)


def draw_two(seed: int, most_ranks: int = 5) -> tuple[Case, Case]:
    """Two strategies for one model on ranks below `most_ranks`, and the same documents for both."""
    rng = random.Random(f"switch {seed}")
    config = _with_biases(_config(rng), seed)
    settings = replace(_settings(rng), lr=1e-3)
    buckets = _bucket_elements(rng)
    while True:
        first, second = (_strategy(rng, config) for _ in range(2))
        fewest = max(sum(p.micro_batches for p in plan.pipelines) for plan in (first, second))
        most = min(plan.rows_per_step for plan in (first, second))
        if first != second and max(first.ranks + second.ranks) < most_ranks and fewest <= most:
            break
    lengths = tuple(
        tuple(rng.randint(8, LONGEST) for _ in range(rng.randint(fewest, most))) for _ in range(2 * STEPS)
    )
    one, two = (Case(seed, config, plan, lengths, settings, buckets) for plan in (first, second))
    return one, two


def features(case: Case) -> frozenset[str]:
    """What a case has of all that a strategy or a model can have."""
    plan, config = case.strategy, case.config
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    parts = max(pipeline.context_parallel_size for pipeline in plan.pipelines)
    widest = max(stage.tensor_parallel_size for stage in stages)
    kinds = {stage.recompute_of(layer) for stage in stages for layer in stage.layer_numbers}
    found = {
        "schedule of a file" if plan.schedule_tasks else plan.schedule: max(
            len(pipeline.stages) for pipeline in plan.pipelines
        )
        > 1,
        plan.context_parallel: parts > 1,
        "three parts": parts == 3,
        "unequal parts": any(len(set(stage.tensor_parallel_sizes)) > 1 for stage in stages),
        "several pipelines": len(plan.pipelines) > 1,
        "stages of unequal TP": any(
            len({stage.tensor_parallel_sizes for stage in pipeline.stages}) > 1 for pipeline in plan.pipelines
        ),
        "TP3": any(3 in stage.tensor_parallel_sizes for stage in stages),
        "TP4": widest == 4,
        "ZeRO-1": plan.zero == 1,
        "recompute full": "full" in kinds,
        "recompute selective": "selective" in kinds,
        "recompute by layer": any(
            len({stage.recompute_of(layer) for layer in stage.layer_numbers}) > 1 for stage in stages
        ),
        "offload": any(stage.offload for stage in stages),
        "offload optimizer": plan.offload_optimizer,
        "sequence parallel": plan.sequence_parallel and widest > 1,
        "without sequence parallel": not plan.sequence_parallel and widest > 1,
        "embedding alone": any(pipeline.stages[0].layers is None for pipeline in plan.pipelines),
        "head alone": any(pipeline.stages[-1].layers is None for pipeline in plan.pipelines),
        "idle ranks": bool(plan.idle_ranks),
        "no micro-batch in one pipeline": any(pipeline.micro_batches == 0 for pipeline in plan.pipelines),
        "tied": config.tie_word_embeddings,
        "biases": config.qkv_bias or config.attention_out_bias or config.mlp_bias,
        "edges of odd sizes": config.vocab_size == 97 and config.ffn_hidden_size == 65 and widest > 1,
        "kv copies": widest > config.num_query_groups,
        "small buckets": case.bucket_elements < BUCKET_ELEMENTS,
        case.settings.name: True,
    }
    return frozenset(name for name, present in found.items() if present)


def _chance(rng: random.Random, percent: int) -> bool:
    return rng.randrange(100) < percent


def _config(rng: random.Random) -> LlamaConfig:
    heads, width = rng.choice(HEADS)
    return LlamaConfig(
        num_layers=rng.randint(4, 8),
        hidden_size=heads * width if _chance(rng, 80) else 40,
        ffn_hidden_size=rng.choice((64, 65)),
        num_attention_heads=heads,
        num_query_groups=rng.choice([groups for groups in (1, 2, 3, heads) if heads % groups == 0]),
        vocab_size=rng.choice((96, 97)),
        head_dim=width,
        tie_word_embeddings=_chance(rng, 40),
    )


def _with_biases(config: LlamaConfig, seed: int) -> LlamaConfig:
    """Biases of every kind in a third of the models, drawn by themselves: other draws stay as they are."""
    rng = random.Random(f"biases {seed}")
    if not _chance(rng, 33):
        return config
    switches = {name: _chance(rng, 60) for name in ("qkv_bias", "attention_out_bias", "mlp_bias")}
    return replace(config, **switches)


def _settings(rng: random.Random) -> OptimizerSettings:
    settings = rng.choice(
        (OptimizerSettings(name="sgd", lr=0.1), OptimizerSettings(name="adam", lr=1e-3, eps=1e-4))
    )
    return replace(
        settings,
        weight_decay=rng.choice((0.0, 0.0, 0.1)),
        clip_grad=rng.choice((None, None, 0.5)),
    )


def _bucket_elements(rng: random.Random) -> int:
    return rng.choice((BUCKET_ELEMENTS, 1, 4000))


def _lengths(rng: random.Random, strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """As many documents as the micro-batches take, or fewer; one of each step is long, others often of one token."""
    fewest = sum(pipeline.micro_batches for pipeline in strategy.pipelines)
    steps = []
    for _ in range(STEPS):
        count = rng.randint(fewest, strategy.rows_per_step)
        lengths = [rng.choice((1, 2, 3, rng.randint(1, LONGEST), LONGEST)) for _ in range(count)]
        lengths[rng.randrange(count)] = rng.randint(8, LONGEST)
        steps.append(tuple(lengths))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the pipelines of one strategy have in common."""

    config: LlamaConfig
    interleaves: bool
    context_parallel: str

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees that the heads allow."""
        heads, groups = self.config.num_attention_heads, self.config.num_query_groups
        return tuple(tp for tp in (1, 2, 3, 4) if heads % tp == 0 and (groups % tp == 0 or tp % groups == 0))

    def sizes(self, parts: int, room: int) -> list[tuple[int, ...]]:
        """All TP degrees of a stage of so many parts that fit in `room` ranks."""
        found: list[tuple[int, ...]] = [()]
        for _ in range(parts):
            found = [(*sizes, tp) for sizes in found for tp in self.degrees]
        heads = self.config.num_attention_heads
        return [
            sizes
            for sizes in found
            if sum(sizes) <= room
            and (self.context_parallel == "ring" or (len(set(sizes)) == 1 and heads % sum(sizes) == 0))
        ]


def _strategy(rng: random.Random, config: LlamaConfig) -> Strategy:
    limits = _Limits(config, _chance(rng, 30), rng.choice(("ring", "ring", "ulysses")))
    count = rng.choice((2, 3, 4, 5, 6, 7, 8, 8))
    rooms = _composition(rng, count, rng.randint(1, min(3, count - limits.interleaves)))
    if limits.interleaves and max(rooms) < 2:
        rooms = [2, *rooms[2:]]
    rooms.sort(reverse=_chance(rng, 50))
    wide = rooms.index(max(rooms))
    counts = [rng.randint(1, 4) for _ in rooms]
    if len(rooms) > 1 and _chance(rng, 25):
        counts[rng.randrange(len(rooms))] = 0
    shapes = [_sizes(rng, limits, room, number == wide) for number, room in enumerate(rooms)]
    working = sum(sum(sizes) for shape in shapes for sizes in shape)
    idle = rng.choice((0, 0, 1, 3))
    ranks = rng.sample(range(working + idle), working) if _chance(rng, 70) else list(range(working))
    idle_ranks = sorted({*range(max(ranks) + 1)} - {*ranks})
    left = iter(ranks)
    pipelines = []
    for shape, micro_batches in zip(shapes, counts, strict=True):
        layers = _layers(rng, limits, len(shape))
        stages = tuple(
            _stage(rng, tuple(next(left) for _ in range(sum(sizes))), sizes, chunks)
            for sizes, chunks in zip(shape, layers, strict=True)
        )
        pipelines.append(Pipeline(micro_batches, rng.randint(1, 4), stages))
    return Strategy(
        tuple(pipelines),
        zero=int(_chance(rng, 50)),
        schedule="interleaved" if limits.interleaves else rng.choice(("gpipe", "1f1b")),
        sequence_parallel=_chance(rng, 60),
        idle_ranks=tuple(idle_ranks),
        context_parallel=limits.context_parallel,
        offload_optimizer=_chance(rng, 20),
    )


def _sizes(rng: random.Random, limits: _Limits, room: int, several: bool) -> list[tuple[int, ...]]:
    """TP degrees of the parts of each stage of a pipeline on at most `room` ranks.

    `several`: an interleaved strategy needs this pipeline to have two stages.
    """
    several = several and limits.interleaves
    least = 2 if several else 1
    parts = rng.choice(
        [cp for cp in (1, 1, 1, 2, 2, 3) if least * cp <= room and limits.sizes(cp, room // least)]
    )
    most = limits.config.num_layers // 2 if limits.interleaves else limits.config.num_layers
    stages: list[tuple[int, ...]] = []
    while room >= parts and len(stages) < min(most, 4):
        kept = parts if several and not stages else 0
        found = limits.sizes(parts, room - kept)
        stages.extend(rng.choices(found, [max(sizes) for sizes in found]))
        room -= sum(stages[-1])
        if len(stages) >= least and _chance(rng, 25):
            break
    return stages


def _layers(rng: random.Random, limits: _Limits, stages: int) -> list[tuple[Layers, ...]]:
    """The layer ranges of each stage."""
    layers = limits.config.num_layers
    if limits.interleaves and stages > 1:
        chunks = rng.randint(2, min(3, layers // stages))
        ranges = _ranges(rng, layers, stages * chunks)
        return [tuple(ranges[stage::stages]) for stage in range(stages)]
    first, last = stages > 1 and _chance(rng, 40), stages > 1 and _chance(rng, 40)
    if stages == 2 and first and last:
        first, last = rng.choice(((True, False), (False, True)))
    ranges = _ranges(rng, layers, stages - first - last)
    return [()] * first + [(each,) for each in ranges] + [()] * last


def _stage(
    rng: random.Random, ranks: tuple[int, ...], sizes: tuple[int, ...], chunks: tuple[Layers, ...]
) -> Stage:
    tp = sizes if len(set(sizes)) > 1 else sizes[0]
    layers = chunks if len(chunks) > 1 else chunks[0] if chunks else None
    recompute: tuple[Recompute, ...] = ()
    if chunks and _chance(rng, 45):
        kinds = ("full", "selective")
        if _chance(rng, 40):
            recompute = (Recompute(rng.choice(kinds)),)
        else:
            pieces = [
                (first + lo, first + hi)
                for first, last in chunks
                for lo, hi in _ranges(rng, last - first + 1, rng.randint(1, last - first + 1))
            ]
            drawn = [(rng.choice(("none", *kinds)), piece) for piece in pieces]
            recompute = tuple(Recompute(kind, piece) for kind, piece in drawn if kind != "none")
    return Stage(ranks, layers, tp, len(sizes), recompute, offload=_chance(rng, 20))


def _order(rng: random.Random, stages: int, micro_batches: int) -> Tasks:
    """Forwards and backwards of each stage as some execution might run them: anyone who can go next does."""
    order: list[list[Action]] = [[] for _ in range(stages)]
    forwards, backwards = [0] * stages, [0] * stages
    for _ in range(2 * stages * micro_batches):
        able = [
            (kind, done, stage)
            for stage in range(stages)
            for kind, done, most in (
                ("F", forwards, forwards[stage - 1] if stage else micro_batches),
                ("B", backwards, backwards[stage + 1] if stage < stages - 1 else forwards[stage]),
            )
            if done[stage] < most
        ]
        kind, done, stage = rng.choice(able)
        order[stage].append(Action(kind, done[stage]))
        done[stage] += 1
    return tuple(map(tuple, order))


def _ranges(rng: random.Random, count: int, pieces: int) -> list[Layers]:
    """0 to count - 1 in so many consecutive ranges, none of them empty."""
    ends = [0]
    for size in _composition(rng, count, pieces):
        ends.append(ends[-1] + size)
    return [(first, end - 1) for first, end in pairwise(ends)]


def _composition(rng: random.Random, total: int, pieces: int) -> list[int]:
    """Positive sizes that add up to `total`."""
    cuts: Sequence[int] = sorted(rng.sample(range(1, total), pieces - 1))
    return [end - first for first, end in zip([0, *cuts], [*cuts, total], strict=True)]
