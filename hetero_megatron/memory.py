"""How much memory every rank needs, from annotations, shapes and the schedule; nothing is allocated (paper Table 7).

Per rank: parameters in the compute dtype; FP32 gradients; FP32 master weights and two Adam moments; activations of
as many micro-batches as the schedule has in flight; buffers of the stage boundaries; the largest temporary. Not
counted: what the driver, communication libraries and the allocator's fragmentation take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

from hetero_megatron.activations import (
    FETCHED_AHEAD,
    FP32,
    ChunkActivations,
    Numbers,
    Sizes,
    chunk_activations,
)
from hetero_megatron.annotation import Annotation
from hetero_megatron.graph.specialize import Chunk, ExecutableGraph
from hetero_megatron.pipeline.action import Action, Batch, Step
from hetero_megatron.program import Program
from hetero_megatron.strategy import Stage

SENDING_PER_STAGE = 2
"""Sends that may still be on their way, as a multiple of the pipeline's depth."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one rank's device, by what they are for.

    Attributes:
        master: 0 where the parameters are the master weights: FP32 without ZeRO-1.
        gradients: the FP32 accumulation buffer, and under ZeRO-1 the gradients in the layout of the states.
        moments: the two of Adam.
        activations: of all micro-batches in flight.
        buffers: activations and gradients that are being received or sent.
        temporary: the gradients of the largest operator, and what recomputation or offloading brings back.
    """

    parameters: int
    gradients: int
    master: int
    moments: int
    activations: int
    buffers: int
    temporary: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's need and what its device has.

    Attributes:
        host: bytes of optimizer states and activations in host memory.
        in_flight: most micro-batches between forward and backward, by chunk, when activations are at their peak.
        by_layer: bytes that each layer keeps of one micro-batch.
        remedies: what would free how many bytes, largest first.
    """

    rank: int
    pipeline: int
    stage: int
    kind: str
    parts: Parts
    host: int
    capacity: int
    in_flight: tuple[int, ...]
    by_layer: Mapping[int, int]
    remedies: tuple[tuple[str, int], ...]

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return self.parts.total <= self.capacity


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of what depends on parameters alone: on the device, and on the host."""

    parameters: int
    gradients: int
    master: int
    moments: int
    host: int


def estimate(program: Program, seq_length: int, item: int) -> tuple[RankMemory, ...]:
    """The memory of every working rank, ascending.

    Args:
        program: the strategy on its cluster.
        seq_length: tokens of a row; a micro-batch has micro_batch_size rows, and max_tokens tokens, at most.
        item: bytes per element of parameters and activations: 4 in FP32, 2 in BF16.
    """
    bounds = _Bounds(program)
    executables: dict[tuple[int, ...], ExecutableGraph] = {}
    found = []
    for rank in program.strategy.ranks:
        part = program.stage(rank).parts[program.part_of(rank)]
        # The ranks of one tensor-parallel group run the same operators.
        if part not in executables:
            executables[part] = program.executable(rank)
        found.append(_rank(program, rank, executables[part], bounds, seq_length, item))
    return tuple(found)


def tokens_of(program: Program, rank: int, seq_length: int) -> int:
    """Most tokens of a micro-batch on a rank's context-parallel part, padding included."""
    number, _ = program.pipeline_of(rank)
    pipeline, part = program.strategy.pipelines[number], program.part_of(rank)
    shares = pipeline.token_shares
    share = -(-pipeline.tokens(seq_length) * shares[part] // sum(shares))
    multiple = program.token_multiple(number, part)
    return -(-share // multiple) * multiple


def _rank(
    program: Program, rank: int, executable: ExecutableGraph, bounds: "_Bounds", seq_length: int, item: int
) -> RankMemory:
    kind, stage = program.cluster.kind(rank), program.stage(rank)
    number, place = program.pipeline_of(rank)[0], program.stage_of(rank)
    steps = program.schedule.steps(number, place)
    sizes = Sizes(
        program.annotated, rank, Numbers(tokens_of(program, rank, seq_length), item, kind.name == "cpu")
    )
    names = [post.name for post in executable.post]
    states = _states(program, bounds, names, rank, item)
    chunks, in_flight = _activations(
        program, executable.chunks, sizes, stage.recompute_of, stage.offload, steps
    )
    parts = Parts(
        states.parameters,
        states.gradients,
        states.master,
        states.moments,
        _sum(in_flight, [chunk.device for chunk in chunks]),
        _buffers(program, executable.chunks, sizes, steps, len(program.pipelines[number])),
        max((_temporary(chunk, stage.offload) for chunk in chunks), default=0),
    )
    memory = RankMemory(
        rank,
        number,
        place,
        kind.name,
        parts,
        states.host + _sum(in_flight, [chunk.host for chunk in chunks]),
        kind.memory_bytes,
        in_flight,
        {layer: size for chunk in chunks for layer, size in sorted(chunk.layers.items())},
        (),
    )
    if memory.fits:
        return memory
    return replace(memory, remedies=_remedies(program, executable.chunks, sizes, steps, states, parts, stage))


class _Bounds:
    """Local element counts; layers repeat, so each shape and annotation is cut once per rank."""

    def __init__(self, program: Program) -> None:
        self._graph = program.annotated.graph
        self._known: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def elements(self, name: str, annotation: Annotation, rank: int) -> int:
        shape = self._graph.parameter_shape(name)
        key = (rank, id(annotation), shape)
        if key not in self._known:
            held = annotation.subgroup_of(rank) is not None
            spans = annotation.region(rank).bounds(shape) if held else ()
            self._known[key] = prod(hi - lo for lo, hi in spans) if held else 0
        return self._known[key]


def _states(program: Program, bounds: _Bounds, names: Sequence[str], rank: int, item: int) -> _States:
    """Buffers as `runtime.state` keeps them: one layout, or two where ZeRO-1 or host memory keeps states apart."""
    values, layouts = program.annotated.values, program.annotated.states
    offload = program.strategy.offload_optimizer
    own = sum(bounds.elements(name, values[name], rank) for name in names)
    cut = sum(bounds.elements(name, layouts[name], rank) for name in names)
    apart = offload or any(layouts[name] != values[name] for name in names)
    master = FP32 * cut if apart or item != FP32 else 0
    gradients = FP32 * (own + cut) if apart else FP32 * own
    if offload:
        return _States(item * own, FP32 * own, 0, 0, 4 * FP32 * cut)
    return _States(item * own, gradients, master, 2 * FP32 * cut, 0)


def _activations(
    program: Program,
    chunks: Sequence[Chunk],
    sizes: Sizes,
    recompute_of: Callable[[int], str],
    offload: bool,
    steps: Sequence[Step],
) -> tuple[list[ChunkActivations], tuple[int, ...]]:
    """Per chunk what one micro-batch keeps, and how many are in flight when that is most."""
    found = [chunk_activations(program.annotated, chunk, sizes, recompute_of, offload) for chunk in chunks]
    return found, most_in_flight(steps, [each.kept for each in found])


def most_in_flight(steps: Sequence[Step], weights: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches between F and B, by chunk, at the moment when they weigh most."""
    now = [0] * len(weights)
    most = tuple(now)
    for step in steps:
        if isinstance(step, Action):
            now[step.chunk] += 1 if step.kind == "F" else -1
            if (_sum(now, weights), now) > (_sum(most, weights), list(most)):
                most = tuple(now)
    return most


def _sum(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _buffers(
    program: Program, chunks: Sequence[Chunk], sizes: Sizes, steps: Sequence[Step], depth: int
) -> int:
    """One receive in each direction, and the sends that may be on their way at the same time."""
    graph = program.annotated.graph
    inward = [sum(map(sizes.bytes, chunk.inputs)) for chunk in chunks]
    outward = [sum(sizes.bytes(graph.node(name).inputs[0]) for name in chunk.outputs) for chunk in chunks]
    sends, receives = [], [0]
    for step in steps:
        if isinstance(step, Batch):
            moved = [0, 0]
            for each in step.items:
                passes_outward = each.kind in ("SEND_F", "RECV_B")
                moved[each.is_send] += (outward if passes_outward else inward)[each.chunk]
            sends.append(moved[True])
            receives.append(moved[False])
    return max(receives) + sum(sorted(sends)[-SENDING_PER_STAGE * depth :])


def _temporary(chunk: ChunkActivations, offload: bool) -> int:
    back = chunk.largest_kept * FETCHED_AHEAD if offload else 0
    return chunk.largest_step + chunk.again + back


def _remedies(
    program: Program,
    chunks: Sequence[Chunk],
    sizes: Sizes,
    steps: Sequence[Step],
    states: _States,
    parts: Parts,
    stage: Stage,
) -> tuple[tuple[str, int], ...]:
    """What would free memory on this rank, and how much."""
    strategy = program.strategy
    found: list[tuple[str, int]] = []
    pipeline = strategy.pipelines[program.pipeline_of(sizes.rank)[0]]
    now = parts.activations + parts.temporary
    for text, recompute, offload in (
        ("recompute: selective", "selective", stage.offload),
        ("recompute: full", "full", stage.offload),
        ("offload: true", "", True),
    ):
        recompute_of = (lambda layer, kind=recompute: kind) if recompute else stage.recompute_of
        each, in_flight = _activations(program, chunks, sizes, recompute_of, offload, steps)
        then = _sum(in_flight, [one.device for one in each])
        then += max((_temporary(one, offload) for one in each), default=0)
        found.append((text, now - then))
    copies = sum(len(p.stages[0].parts) for p in strategy.pipelines)
    if not strategy.zero and copies > 1 and not strategy.offload_optimizer:
        # Master weights, moments and gradients in the states' layout: 16 bytes per element, cut in `copies`.
        found.append(("zero: 1", states.master + states.moments - 2 * states.moments // copies))
    if not strategy.offload_optimizer:
        # The gradients in the states' layout, where they are apart, leave the device too.
        apart = states.gradients - FP32 * states.parameters // sizes.numbers.item
        found.append(("offload_optimizer: true", states.master + states.moments + apart))
    if pipeline.micro_batch_size > 1:
        size = pipeline.micro_batch_size
        per_token = parts.activations + parts.buffers + parts.temporary
        found.append((f"micro_batch_size: {size // 2}", per_token - per_token * (size // 2) // size))
    helpful = [(text, freed) for text, freed in found if freed > 0]
    return tuple(sorted(helpful, key=lambda remedy: -remedy[1]))
