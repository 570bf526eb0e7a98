"""What autograd keeps of one micro-batch between forward and backward, in bytes, from annotations and shapes alone.

With T tokens of a rank's context-parallel part, t its tensor-parallel degree, s = t under sequence parallelism else
1, b bytes per element (2 in BF16), and D, C, K, F, V the widths of the residual stream, of all query heads, of all
key/value heads, of the feed-forward block and of the vocabulary, a layer keeps

    norms       2 (b T D / s + 4 T / s)         their inputs (the residual stream), and one FP32 number per token
    q, k, v     b T D                           their common input, whole on every tensor-parallel rank
    attention   b T (2 C + 2 K) / t + 4 T H / t q, k, v, the result (which wo keeps too), FP32 log-sums: FlashAttention
    gate, up    b T D                           their common input
    swiglu      3 b T F / t                     gate, silu(gate), up
    down        b T F / t                       its input

`selective` leaves out silu(gate), down's input, the attention's result and its log-sums; `full` leaves the input
of the layer, b T D / s. Besides layers: the angles of the rotary embedding, the embedding's row numbers, the input of the
head, and on the last stage the FP32 softmax 4 T V / t. Nothing is counted twice when several operators keep the same memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from hetero_megatron.graph.annotated import AnnotatedGraph
from hetero_megatron.graph.nodes import Kind, Node
from hetero_megatron.graph.specialize import Chunk
from hetero_megatron.graph.symbols import Symbol
from hetero_megatron.recompute import Run, external_values, recomputed_runs

SMALLEST_OFFLOADED = 2**16
"""Bytes. A smaller tensor stays on the device: moving it costs more than it frees."""
FETCHED_AHEAD = 4
"""So many offloaded tensors are on their way back before the backward asks for them."""
FP32, INT64, BOOL = 4, 8, 1


@dataclass(frozen=True, slots=True)
class Numbers:
    """What sizes depend on besides the graph.

    Attributes:
        tokens: of one micro-batch on this rank's context-parallel part, padding included.
        item: bytes of an element of parameters and activations.
        composed_norm: RMSNorm is made of several operators, which keep its input and result in FP32, as PyTorch
            does on a CPU; otherwise one kernel keeps the input and a number per token.
    """

    tokens: int
    item: int
    composed_norm: bool = False


@dataclass(frozen=True, slots=True)
class ChunkActivations:
    """Bytes of one micro-batch in one chunk on one rank.

    Attributes:
        layers: what each layer keeps.
        others: what embedding, final norm, head and loss keep.
        received: the chunk's inputs, which stay on the device in any case.
        host: of all these, what offloading moves to host memory.
        largest_kept: the largest single tensor that is moved to the host, 0 when none is.
        largest_step: operands, result and parameters of the largest operator: what its backward needs again.
        again: what the largest recomputed run holds while its backward goes on.
    """

    layers: dict[int, int]
    others: int
    received: int
    host: int
    largest_kept: int
    largest_step: int
    again: int

    @property
    def kept(self) -> int:
        """Bytes kept, on the device or on the host."""
        return sum(self.layers.values()) + self.others

    @property
    def device(self) -> int:
        """Bytes kept on the device."""
        return self.kept - self.host


class Sizes:
    """Bytes of a rank's values, and which names stand for the same memory."""

    def __init__(self, annotated: AnnotatedGraph, rank: int, numbers: Numbers) -> None:
        self.annotated, self.rank, self.numbers = annotated, rank, numbers
        self._elements: dict[tuple[object, int], int] = {}

    def elements(self, name: str) -> int:
        """Local number of elements."""
        # Layers repeat, and so do their annotations: each is worked out once.
        key = (self.annotated.graph.node(name).shape, id(self.annotated.values[name]))
        if key not in self._elements:
            shape = self.annotated.local_shape(name, self.rank)
            self._elements[key] = prod(
                -(-self.numbers.tokens // dim.divisor) if isinstance(dim, Symbol) else dim for dim in shape
            )
        return self._elements[key]

    def bytes(self, name: str) -> int:
        """Local bytes of an activation or parameter."""
        return self.elements(name) * self.numbers.item

    def rows(self, name: str) -> int:
        """Local number of tokens of an activation."""
        (first, *_) = self.annotated.local_shape(name, self.rank)
        return -(-self.numbers.tokens // first.divisor) if isinstance(first, Symbol) else first

    def memory(self, name: str) -> str:
        """The value whose memory `name` uses: a Reshard that leaves a rank its shard copies nothing."""
        node = self.annotated.graph.node(name)
        values = self.annotated.values
        while node.kind is Kind.RESHARD and self.rank in values[node.inputs[0]].ranks:
            before = node.inputs[0]
            if values[before].region(self.rank) != values[node.name].region(self.rank):
                break
            node = self.annotated.graph.node(before)
        return node.name


Kept = dict[str, int]
"""Bytes by value, or by a name of its own for what is no value of the graph."""


def chunk_activations(
    annotated: AnnotatedGraph, chunk: Chunk, sizes: Sizes, recompute_of: Callable[[int], str], offload: bool
) -> ChunkActivations:
    """What one micro-batch in `chunk` keeps under recomputation and offloading."""
    nodes = chunk.nodes
    runs = recomputed_runs(nodes, recompute_of)
    received = {name: sizes.bytes(name) for name in chunk.inputs}
    kept: Kept = dict(received)
    layers: dict[int, int] = {layer: 0 for node in nodes if (layer := layer_of(node)) is not None}
    others = again = 0
    for members, run in _units(nodes, runs):
        if run is None:
            found = _together(keeps(node, sizes) for node in members)
        else:
            entering = [sizes.memory(n) for n in external_values(nodes, run) if n in annotated.values]
            found = {name: sizes.bytes(name) for name in entering}
            plain = _together(keeps(node, sizes) for node in members)
            again = max(again, sum(size for name, size in plain.items() if name not in {*found, *kept}))
        new = {name: size for name, size in found.items() if name not in kept}
        kept |= new
        layer = layer_of(members[0])
        if layer is None:
            others += sum(new.values())
        else:
            layers[layer] += sum(new.values())
    for name, size in received.items():
        layer = layer_of(annotated.graph.node(name))
        if layer is None:
            others += size
        else:
            layers[layer] = layers.get(layer, 0) + size
    moved = [
        size for name, size in kept.items() if offload and name not in received and size >= SMALLEST_OFFLOADED
    ]
    return ChunkActivations(
        layers,
        others,
        sum(received.values()),
        sum(moved),
        max(moved, default=0),
        max((_step(node, sizes) for node in nodes), default=0),
        again,
    )


def layer_of(node: Node) -> int | None:
    """The number of the layer that a node is in."""
    return int(node.module.split(".")[1]) if node.module.startswith("layers.") else None


def keeps(node: Node, sizes: Sizes) -> Kept:
    """What the backward of one operator needs, by the last part of its module's name.

    An operator that is not known here is taken to keep its operands and its result.
    """
    role = node.module.rsplit(".", 1)[-1]
    if node.kind is Kind.RESHARD or not node.module:
        return {}
    operands = [name for name in node.inputs if sizes.annotated.graph.node(name).role is None]
    kept = {memory: sizes.bytes(memory) for memory in map(sizes.memory, operands)}
    rows = sizes.rows(node.inputs[0])
    head_dim = next((size for factor, size in node.sizes if factor == "k" and isinstance(size, int)), 1)
    if role == "rope":
        # Cosine and half as many sines per token, one object for all layers.
        return {"angles": sizes.numbers.item * rows * (head_dim + head_dim // 2)}
    if role.endswith("norm"):
        if sizes.numbers.composed_norm:
            fp32 = FP32 * sizes.elements(node.name)
            copy = {f"{node.name} input": fp32} if sizes.numbers.item != FP32 else kept
            kept = copy | {f"{node.name} normalised": fp32}
        return kept | {f"{node.name} scale": FP32 * rows}
    if role == "attention":
        heads = sizes.elements(node.name) // (rows * head_dim)
        return kept | {node.name: sizes.bytes(node.name), f"{node.name} log-sums": FP32 * rows * heads}
    if role == "swiglu":
        return kept | {f"{node.name} silu": sizes.bytes(node.name)}
    if role == "embedding":
        # With the whole vocabulary, the token ids themselves, which are there anyway.
        cut = any(sizes.annotated.values[name].region(sizes.rank).cuts for name in node.inputs[1:])
        return {f"{node.name} rows": (INT64 + BOOL) * rows} if cut else {}
    if role == "loss":
        softmax = FP32 * sizes.elements(node.inputs[0])
        return {f"{node.name} softmax": softmax, f"{node.name} columns": (INT64 + FP32 + 2 * BOOL) * rows}
    if role.endswith("_bias"):
        return {}  # a sum needs neither operand again
    known = {"wq", "wk", "wv", "wo", "gate", "up", "down", "head"}
    return kept if role in known else kept | {node.name: sizes.bytes(node.name)}


def _units(nodes: Sequence[Node], runs: Sequence[Run]) -> Iterable[tuple[Sequence[Node], Run | None]]:
    """Single nodes, and recomputed runs as one."""
    at = 0
    for run in runs:
        yield from (([node], None) for node in nodes[at : run.first])
        yield nodes[run.first : run.end], run
        at = run.end
    yield from (([node], None) for node in nodes[at:])


def _together(each: Iterable[Kept]) -> Kept:
    found: Kept = {}
    for kept in each:
        found |= kept
    return found


def _step(node: Node, sizes: Sizes) -> int:
    """Bytes of what an operator reads and makes: gradients of the same sizes exist while its backward runs."""
    names = [name for name in node.inputs if sizes.annotated.graph.node(name).role != "input"]
    result = [node.name] if sizes.annotated.graph.node(node.name).shape else []
    return sum(sizes.bytes(name) for name in [*names, *result])
