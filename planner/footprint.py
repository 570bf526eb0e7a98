"""Device memory of every rank in closed form, without a Program (paper Table 7).

The formulas are those of `hetero_megatron.activations` and `hetero_megatron.memory`, for stages as a strategy writes
them. Where the exact account depends on details of a Program, the larger value stands here: a plan that fits by this
account fits by the exact one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from hetero_megatron.activations import BOOL, FETCHED_AHEAD, FP32, INT64, SMALLEST_OFFLOADED
from hetero_megatron.cluster import Cluster, model_of
from hetero_megatron.memory import SENDING_PER_STAGE, most_in_flight
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.pipeline.action import Action, Batch, Step
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.schedule import tasks
from hetero_megatron.planner.profiles import Profiles, Unit
from hetero_megatron.planner.work import ITEM
from hetero_megatron.strategy import Pipeline, Stage, Strategy


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a chunk keeps of one micro-batch.

    Attributes:
        device, host: after offloading.
        largest: the largest offloaded tensor.
        again: what the largest recomputed run holds beside.
    """

    device: int
    host: int
    largest: int
    again: int


@dataclass(frozen=True, slots=True)
class Local:
    """Sizes on one rank: tokens of its part, its degree, and how norms are computed."""

    tokens: int
    tp: int
    composed_norm: bool
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of one rank.

    Attributes:
        fixed: whatever does not come and go with micro-batches.
        weights: what one micro-batch keeps in each chunk.
        in_flight: micro-batches in each chunk at the peak.
    """

    fixed: int
    weights: tuple[int, ...]
    in_flight: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most at any time."""
        return self.fixed + sum(a * b for a, b in zip(self.weights, self.in_flight, strict=True))


class Footprint:
    """Bytes per rank for one model on one cluster."""

    def __init__(
        self,
        config: LlamaConfig,
        cluster: Cluster,
        seq_length: int,
        precision: str,
        sequence_parallel: bool = True,
        profiles: Profiles | None = None,
    ) -> None:
        """What `profiles` has measured of layers that are not recomputed stands in the place of the formulas."""
        self.config, self.cluster, self.seq_length = config, cluster, seq_length
        self.item, self.sequence_parallel = ITEM[precision], sequence_parallel
        self.precision, self.profiles = precision, profiles or Profiles()
        self._layers: dict[tuple[Local, str], tuple[list[int], int]] = {}
        self._elements: dict[tuple[int, int, int, bool, bool, bool], tuple[int, int]] = {}
        self._ranks: dict[tuple[object, ...], Parts] = {}

    def per_rank(self, strategy: Strategy, replicas: int | None = None) -> dict[int, Parts]:
        """Bytes on the device of every working rank; `replicas` if these are not all pipelines of the strategy."""
        found: dict[int, Parts] = {}
        replicas = replicas or sum(len(p.stages[0].parts) for p in strategy.pipelines)
        whole = all(
            size == 1 for p in strategy.pipelines for s in p.stages for size in s.tensor_parallel_sizes
        )
        for number, pipeline in enumerate(strategy.pipelines):
            for place, stage in enumerate(pipeline.stages):
                for part, ranks in enumerate(stage.parts):
                    shares = pipeline.token_shares
                    kind = self.cluster.kind(ranks[0]).name
                    tokens = self._tokens(pipeline, shares, part, strategy)
                    local = Local(tokens, len(ranks), model_of(kind) == "cpu", kind)
                    key = (
                        local,
                        stage.chunks,
                        stage.recompute,
                        stage.offload,
                        place == 0,
                        place == len(pipeline.stages) - 1,
                        (number, place) if strategy.schedule_tasks else (len(pipeline.stages), place),
                        pipeline.micro_batches,
                        strategy.schedule,
                        (strategy.zero and replicas, strategy.offload_optimizer, whole),
                    )
                    if key not in self._ranks:
                        self._ranks[key] = self._rank(strategy, number, place, local, replicas, whole)
                    found.update(dict.fromkeys(ranks, self._ranks[key]))
        return found

    def updated_elements(self, strategy: Strategy) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per pipeline, stage and part: elements whose states one rank holds and updates."""
        replicas = sum(len(p.stages[0].parts) for p in strategy.pipelines)
        cut = replicas if strategy.zero else 1
        return tuple(
            tuple(
                tuple(
                    self.elements(
                        len(stage.layer_numbers),
                        size,
                        cut,
                        place == 0,
                        place == len(pipeline.stages) - 1,
                        False,
                    )[1]
                    for size in stage.tensor_parallel_sizes
                )
                for place, stage in enumerate(pipeline.stages)
            )
            for pipeline in strategy.pipelines
        )

    def elements(
        self, layers: int, tp: int, cut: int, first: bool, last: bool, whole: bool
    ) -> tuple[int, int]:
        """Parameters of one rank, and those whose states it holds when they are cut in `cut`.

        `whole`: no pipeline uses tensor parallelism, so that rows are cut; else columns of what is cut by rows.
        """
        key = (layers, tp, cut, first, last, whole)
        if key not in self._elements:
            matrices, norms = self._matrices(tp), 2 * self.config.hidden_size
            own = layers * (sum(o * i for o, i, _ in matrices) + norms)
            held = layers * (sum(_cut(*each, cut, whole) for each in matrices) + 2 * _up(norms // 2, cut))
            table = (_up(self.config.vocab_size, tp), self.config.hidden_size, 0)
            tables = int(first) + int(last)
            if self.config.tie_word_embeddings and first and last:
                tables = 1
            own += tables * table[0] * table[1] + last * self.config.hidden_size
            held += tables * _cut(*table, cut, whole) + last * _up(self.config.hidden_size, cut)
            self._elements[key] = own, held
        return self._elements[key]

    def _matrices(self, tp: int) -> list[tuple[int, int, int]]:
        """(rows, columns, dim that tensor parallelism cuts) of a layer's matrices on one rank."""
        c = self.config
        kv = _up(c.num_query_groups, min(tp, c.num_query_groups)) * c.head_size
        hidden, ffn, query = c.hidden_size, _up(c.ffn_hidden_size, tp), _up(c.query_size, tp)
        rows = [(query, hidden, 0), (kv, hidden, 0), (kv, hidden, 0), (ffn, hidden, 0), (ffn, hidden, 0)]
        return [*rows, (hidden, query, 1), (hidden, ffn, 1)]

    def _tokens(self, pipeline: Pipeline, shares: tuple[int, ...], part: int, strategy: Strategy) -> int:
        """Most tokens of a micro-batch on a part, padded to what its stages cut."""
        share = -(-pipeline.tokens(self.seq_length) * shares[part] // sum(shares))
        multiple = (
            lcm(*(stage.tensor_parallel_sizes[part] for stage in pipeline.stages))
            if strategy.sequence_parallel
            else 1
        )
        return _up(share, multiple) * multiple

    def _rank(
        self, strategy: Strategy, number: int, place: int, local: Local, replicas: int, whole: bool
    ) -> Parts:
        pipeline = strategy.pipelines[number]
        stage = pipeline.stages[place]
        first, last = place == 0, place == len(pipeline.stages) - 1
        cut = replicas if strategy.zero else 1
        own, held = self.elements(len(stage.layer_numbers), local.tp, cut, first, last, whole)
        total = self._states(own, held, cut > 1, strategy.offload_optimizer)
        final = pipeline.chunks - 1
        chunks = [
            self._kept(stage, chunk, local, first and not chunk, last and chunk == final)
            for chunk in range(pipeline.chunks)
        ]
        boundary = self._residual(local)
        flight, moved = self._flow(strategy, number, place)
        in_flight = flight([each.device + each.host for each in chunks])
        total += moved * boundary
        total += max(
            self._largest_step(local, bool(stage.layer_numbers), first, last)
            + each.again
            + FETCHED_AHEAD * each.largest
            for each in chunks
        )
        return Parts(total, tuple(each.device for each in chunks), in_flight)

    def stage(
        self, stage: Stage, local: Local, cut: int, first: bool, last: bool, whole: bool = False
    ) -> tuple[int, int, int]:
        """Of a stage by itself: bytes that are always there, what a micro-batch keeps, and one boundary tensor."""
        own, held = self.elements(len(stage.layer_numbers), local.tp, cut, first, last, whole)
        kept = self._kept(stage, 0, local, first, last)
        step = self._largest_step(local, bool(stage.layer_numbers), first, last)
        fixed = self._states(own, held, cut > 1, False) + step + kept.again
        return fixed, kept.device, self._residual(local)

    def _states(self, own: int, held: int, cut: bool, offload: bool) -> int:
        apart = cut or offload
        gradients = FP32 * (own + held) if apart else FP32 * own
        if offload:
            return self.item * own + FP32 * own
        master = FP32 * held if apart or self.item != FP32 else 0
        return self.item * own + gradients + master + 2 * FP32 * held

    def _residual(self, local: Local) -> int:
        """Bytes of the residual stream on one rank."""
        split = local.tp if self.sequence_parallel else 1
        return self.item * _up(local.tokens, split) * self.config.hidden_size

    def _norm(self, local: Local) -> list[int]:
        """What a norm keeps beside its input, and its input where that is a copy."""
        split = local.tp if self.sequence_parallel else 1
        rows = _up(local.tokens, split)
        fp32 = FP32 * rows * self.config.hidden_size
        if not local.composed_norm:
            return [FP32 * rows]
        return [fp32, FP32 * rows] if self.item == FP32 else [fp32, fp32, FP32 * rows]

    def layer(self, local: Local, recompute: str) -> tuple[list[int], int]:
        """Bytes of each tensor that a layer keeps, and what its largest recomputed run holds beside."""
        key = (local, recompute)
        if key not in self._layers:
            self._layers[key] = self._layer(local, recompute)
        return self._layers[key]

    def _layer(self, local: Local, recompute: str) -> tuple[list[int], int]:
        c, tokens, tp, item = self.config, local.tokens, local.tp, self.item
        residual, norm = self._residual(local), self._norm(local)
        query = item * tokens * _up(c.query_size, tp)
        keys = 2 * item * tokens * _up(c.num_query_groups, min(tp, c.num_query_groups)) * c.head_size
        logs = FP32 * tokens * _up(c.num_attention_heads, tp)
        ffn, common = item * tokens * _up(c.ffn_hidden_size, tp), item * tokens * c.hidden_size
        copies = local.composed_norm and item != FP32
        norms = [*norm, *norm, *([] if copies else [residual, residual])]
        plain = [*norms, common, common, query, keys, query, logs, ffn, ffn, ffn, ffn]
        measured = self._measured(local, "layer")
        angles = item * tokens * (c.head_size + c.head_size // 2)
        if recompute == "full":
            return [residual], sum(plain) + angles
        if recompute == "selective":
            beside = max(2 * query + keys // 2 + logs + angles, 2 * ffn)
            return [*norms, common, common, query, keys, ffn, ffn], beside
        return (plain if measured is None else [measured]), 0

    def _measured(self, local: Local, unit: Unit) -> int | None:
        return self.profiles.kept_bytes(local.kind, self.precision, unit, local.tp, local.tokens)

    def _kept(self, stage: Stage, number: int, local: Local, first: bool, last: bool) -> Kept:
        c, tokens = self.config, local.tokens
        kept: list[int] = []
        again = 0
        layers = range(stage.chunks[number][0], stage.chunks[number][1] + 1) if stage.chunks else range(0)
        kinds = [stage.recompute_of(layer) for layer in layers]
        for kind in kinds:
            sizes, beside = self.layer(local, kind)
            kept += sizes
            again = max(again, beside)
        if "none" in kinds:
            kept.append(self.item * tokens * (c.head_size + c.head_size // 2))
        residual = self._residual(local)
        table, head = self._measured(local, "embedding"), self._measured(local, "head")
        if first and table is not None:
            kept.append(table)
        elif first and local.tp > 1:
            kept.append((INT64 + BOOL) * tokens)
        if last and head is not None:
            kept.append(head)
        elif last:
            copies = local.composed_norm and self.item != FP32
            kept += [*self._norm(local), *([] if copies else [residual]), self.item * tokens * c.hidden_size]
            kept += [FP32 * tokens * _up(c.vocab_size, local.tp), (INT64 + FP32 + 2 * BOOL) * tokens]
        received = 0 if first else residual
        if received and local.composed_norm and self.item != FP32:
            kept.append(residual)
        moved = [size for size in kept if stage.offload and size >= SMALLEST_OFFLOADED]
        # The chunk's own input stays on the device.
        if received in moved:
            moved.remove(received)
        return Kept(sum(kept) - sum(moved), sum(moved), max(moved, default=0), again)

    def _largest_step(self, local: Local, layers: bool, first: bool, last: bool) -> int:
        """Operands, weight and result of the largest operator of a stage."""
        c, tokens, tp = self.config, local.tokens, local.tp
        ffn, vocab, query = _up(c.ffn_hidden_size, tp), _up(c.vocab_size, tp), _up(c.query_size, tp)
        kv = _up(c.num_query_groups, min(tp, c.num_query_groups)) * c.head_size
        hidden = c.hidden_size
        found = [0]
        if layers:
            found += [tokens * hidden + ffn * hidden + tokens * ffn, 3 * tokens * ffn]
            found += [tokens * hidden + query * hidden + tokens * query, 2 * tokens * (query + kv)]
            found.append(3 * self._residual(local) // self.item)
        if last:
            found.append(tokens * hidden + vocab * hidden + tokens * vocab)
        if first:
            found.append(vocab * hidden + tokens * hidden)
        return self.item * max(found)

    def _flow(self, strategy: Strategy, number: int, place: int) -> "tuple[_Flight, int]":
        """How many micro-batches are in flight, by chunk weights; and how many boundary tensors exist at once."""
        pipeline = strategy.pipelines[number]
        depth, count = len(pipeline.stages), pipeline.micro_batches
        if not strategy.schedule_tasks and strategy.schedule in ("1f1b", "gpipe"):
            flight = count if strategy.schedule == "gpipe" else min(count, depth - place)
            sides = (place > 0) + (place < depth - 1)
            sends = min(sides * count, SENDING_PER_STAGE * depth)
            return _Flight((flight,), ()), sends + (1 if sides and count else 0)
        if strategy.schedule_tasks:
            steps = _lowered(strategy.schedule_tasks[number], pipeline.chunks)[place]
        else:
            steps = _scheduled(strategy.schedule, depth, count, pipeline.chunks)[place]
        sends = receives = 0
        for step in steps:
            if isinstance(step, Batch):
                sends += sum(each.is_send for each in step.items)
                receives = max(receives, sum(not each.is_send for each in step.items))
        return _Flight((), steps), min(sends, SENDING_PER_STAGE * depth * 2) + receives


@dataclass(frozen=True, slots=True)
class _Flight:
    """Micro-batches in flight: known, or to be counted in a stage's steps."""

    known: tuple[int, ...]
    steps: tuple[Step, ...]

    def __call__(self, weights: Sequence[int]) -> tuple[int, ...]:
        return self.known or _most(self.steps, tuple(weights))


@lru_cache(maxsize=1024)
def _most(steps: tuple[Step, ...], weights: tuple[int, ...]) -> tuple[int, ...]:
    return most_in_flight(steps, weights)


@lru_cache(maxsize=256)
def _scheduled(name: str, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[Step, ...], ...]:
    own = "1f1b" if name == "interleaved" and (stages, chunks) == (1, 1) else name
    return lower(tasks(own, stages, micro_batches, chunks), Boundaries.chain(stages, chunks)).stages


@lru_cache(maxsize=64)
def _lowered(order: tuple[tuple[Action, ...], ...], chunks: int) -> tuple[tuple[Step, ...], ...]:
    return lower(order, Boundaries.chain(len(order), chunks), early=chunks > 1).stages


def _up(size: int, parts: int) -> int:
    return -(-size // parts)


def _cut(rows: int, columns: int, tp_dim: int, cut: int, whole: bool) -> int:
    """Elements of a matrix that one of `cut` replicas holds the states of."""
    by_rows = whole or tp_dim == 1
    return _up(rows, cut) * columns if by_rows else rows * _up(columns, cut)
