"""What context-parallel attention sends, by the cuts and routes that a run uses (paper Figure 4)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from hetero_megatron.program import Program
from hetero_megatron.runtime.context import Part, share, visible
from hetero_megatron.runtime.context_group import columns_of, looks_across_tokens, routes


@dataclass(frozen=True, slots=True)
class AttentionLine:
    """Bytes that all ranks of a pipeline together send for one micro-batch in each of `layers`."""

    pipeline: int
    mode: str
    parts: int
    layers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


def attention_lines(program: Program, seq_length: int, head_dim: int, width: int) -> Iterator[AttentionLine]:
    """A line per context-parallel pipeline, and per degree of tensor parallelism where its stages differ.

    Micro-batches are full, and every row is one document of `seq_length` tokens; more documents per row send less by
    ring and as much by Ulysses. `width` is the bytes of an activation's element.

    Ring, forward: for every two parts, the key rows of the one that queries of the other see, times the columns of
    keys and of values that the other's ranks work with. Backward, the same rows go again and their gradients return.
    Ulysses, forward: each rank keeps 1/n of its queries, keys and values (kv heads repeated until n divides them), and
    sends the rest; of its result it keeps its own tokens. The gradients take the same ways backward.
    """
    for number, pipeline in enumerate(program.strategy.pipelines):
        if (count := pipeline.context_parallel_size) == 1:
            continue
        tokens = pipeline.tokens(seq_length)
        ends = (*range(0, tokens, min(tokens, seq_length)), tokens)
        multiples = [program.token_multiple(number, part) for part in range(count)]
        parts = share(ends, pipeline.token_shares, multiples)
        found: dict[tuple[int, int], list[int]] = {}
        for stage in pipeline.stages:
            if not stage.layer_numbers:
                continue
            query, key = _operands(program, stage.layer_numbers[0])
            if program.strategy.context_parallel == "ring":
                forward = _ring(program, key, stage.parts, parts) * width
                backward = 2 * forward
            else:
                forward = backward = _ulysses(program, query, key, stage.parts, parts, head_dim) * width
            found.setdefault((forward, backward), []).extend(stage.layer_numbers)
        for (forward, backward), layers in found.items():
            mode = program.strategy.context_parallel
            yield AttentionLine(number, mode, count, tuple(sorted(layers)), forward, backward)


def _operands(program: Program, layer: int) -> tuple[str, str]:
    """Names of the queries and keys of a layer's attention."""
    return next(
        (node.inputs[0], node.inputs[1])
        for node in program.annotated.graph.nodes
        if node.name.startswith(f"layers.{layer}.") and looks_across_tokens(node) and len(node.inputs) > 2
    )


def _ring(program: Program, key: str, ranks: tuple[tuple[int, ...], ...], parts: tuple[Part, ...]) -> int:
    """Elements of keys and values that travel."""
    part_of = {rank: part for part, own in enumerate(ranks) for rank in own}
    sent = 0
    for route in routes([columns_of(program, key, own) for own in ranks]):
        src, dst = part_of[route.src], part_of[route.dst]
        blocks = visible(parts[dst], parts[src], dst, src, len(parts))
        rows = sum(hi - lo for _, (lo, hi) in blocks)
        sent += 2 * rows * (route.columns[1] - route.columns[0])
    return sent


def _ulysses(
    program: Program,
    query: str,
    key: str,
    ranks: tuple[tuple[int, ...], ...],
    parts: tuple[Part, ...],
    head_dim: int,
) -> int:
    """Elements of queries, keys, values and results that travel."""
    count, total, sent = len(parts), sum(part.tokens for part in parts), 0
    for own, part in zip(ranks, parts, strict=True):
        columns = zip(columns_of(program, query, own), columns_of(program, key, own), strict=True)
        for (_, (q_lo, q_hi)), (_, (k_lo, k_hi)) in columns:
            heads = (k_hi - k_lo) // head_dim
            repeated = (k_hi - k_lo) * (count // gcd(heads, count))
            sent += part.tokens * (count - 1) * (q_hi - q_lo + 2 * repeated) // count
            sent += (total - part.tokens) * (q_hi - q_lo) // count
    return sent
