"""How HexiScale would plan: devices dealt over pipelines, layers by memory, GPipe, broadcasts (paper §9 a, Table 3).

After HexiScale (arXiv 2409.01143; its scheduler was published as FlashFlex). Its limits, kept here:

- GPipe: all forward passes of a step before the first backward pass, whose activations are all held.
- A stage lies in one node, on one kind; its TP is 8, 4, 2 or 1, and a node's devices in a pipeline make one of few
  tuples of stages: 8 of them [8], [4, 4] or [4, 2, 2], never four stages of 2.
- Its scheduler gives layers in proportion to the memory of a stage, not to its speed, and all pipelines equally many
  micro-batches; pipelines have about the same memory together, and all devices take part.
- Between stages the nearest two ranks exchange the whole activations, which are then broadcast in the stage: no rank
  sends its part only.
- No ZeRO and no context parallelism.

In its favour: layers and micro-batches by speed are tried as well, as a person would tune them (the paper's baselines
"are carefully tuned"); instead of its graph partitioner and local choices, all ways to deal devices within these limits
are compared, by a bound and then by our cost model; gradients overlap as ours do; all layers are recomputed where memory
asks for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations, product

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.drawn import evenly, recomputed, strategy_of_blocks
from hetero_megatron.planner.lanes import Blocks
from hetero_megatron.planner.level_two import PipelineLoad, StageLoad, deal_micro_batches, split_layers
from hetero_megatron.planner.problem import Block, Problem
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.realize import Priced, price
from hetero_megatron.strategy import Stage

TUPLES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    3: ((2, 1), (1, 1, 1)),
    4: ((4,), (2, 2), (2, 1, 1)),
    5: ((4, 1), (2, 2, 1)),
    6: ((4, 2), (2, 2, 2)),
    7: ((4, 2, 1), (2, 2, 2, 1)),
    8: ((8,), (4, 4), (4, 2, 2)),
}
"""TP of the stages that so many devices of a node make in a pipeline."""
CUTS = (1, 2, 4, 8)
"""Into how many equal parts nodes are cut before they are dealt."""
MOST_ORDERED, FITTING, TRIED = 3, 24, 192
FEW, ALL_NUMBERS, COMBINED = 128, 12, 16
"""Up to so many devices, every number of pipelines and every combination of tuples is tried; beyond, up to so many
pipelines and numbers that divide the devices, and so many combinations at most."""

Pieces = tuple[tuple[str, int], ...]
"""(kind, devices) of each node of a pipeline."""


class BroadcastCosts(Costs):
    """Costs where a stage gets whole activations on its nearest rank, and broadcasts them."""

    @staticmethod
    def like(costs: Costs) -> "BroadcastCosts":
        """The same model, cluster and profiles."""
        return BroadcastCosts(
            costs.config,
            costs.cluster,
            costs.profiles,
            costs.seq_length,
            costs.precision,
            costs.sequence_parallel,
            costs.context_parallel,
            costs.bucket_elements,
        )

    def boundary(self, sender: Stage, receiver: Stage, tokens: int) -> float:
        """Seconds that one micro-batch's activations, or their gradients, travel: one message and a broadcast."""
        size = tokens * self.config.hidden_size * self.item
        links = [self.cluster.link(a, b) for a in sender.ranks for b in receiver.ranks]
        sent = self.profiles.transfer_seconds(max(links, key=bytes_per_second), "p2p", 2, size)
        # One rank has all of it, the others want all of it: what an all-gather takes at least.
        inside = self.slowest_link(receiver.ranks)
        return sent + self.profiles.transfer_seconds(inside, "all_gather", len(receiver.ranks), size)


def hexiscale(problem: Problem, costs: Costs) -> Priced | None:
    """The fastest plan within HexiScale's limits, or None where none fits."""
    own = BroadcastCosts.like(costs)
    drawing = _Drawing(own, problem)
    drawn = sorted(
        each
        for lanes in dealings(problem)
        for rows in problem.rows
        if problem.global_batch_size // rows >= len(lanes)
        for each in drawing.ways(lanes, rows)
    )
    enough = FITTING if len(problem.cluster.devices) <= FEW else FITTING // 4
    best: Priced | None = None
    fitting = 0
    for bound, rows, lanes, layers, counts in drawn[:TRIED]:
        if fitting == enough or (best is not None and bound >= best.seconds):
            break
        strategy = strategy_of_blocks(problem, lanes, layers, counts, rows)
        if strategy is None:
            continue
        strategy = replace(strategy, schedule="gpipe")
        found = price(strategy, problem.cluster, own)
        if found is None and "full" in problem.choices.recompute:
            found = price(recomputed(strategy), problem.cluster, own)
        if found is not None:
            fitting += 1
            if best is None or found.seconds < best.seconds:
                best = found
    return best


Way = tuple[float, int, tuple[Blocks, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]
"""A bound in seconds, rows, and per pipeline its stages, layers and micro-batches."""


class _Drawing:
    """Layers and micro-batches for stages: as the scheduler gives them, and by speed."""

    def __init__(self, costs: Costs, problem: Problem) -> None:
        self.costs, self.problem = costs, problem
        self.links = {kind.name: kind.link for kind in problem.cluster.kinds}
        self._by_speed: dict[tuple[Blocks, int, int], tuple[int, ...] | None] = {}

    def ways(self, lanes: tuple[Blocks, ...], rows: int) -> Iterator[Way]:
        """With bounds: a pipeline's slowest stage takes all its micro-batches, and the others one each."""
        total = self.problem.global_batch_size // rows
        layers = tuple(by_memory(self.problem, lane) for lane in lanes)
        counts = evenly(total, len(lanes))
        loads = self._loads(lanes, layers, rows)
        yield _slowest(loads, counts), rows, lanes, layers, counts
        split = [self._split(lane, rows, max(1, total // len(lanes))) for lane in lanes]
        fast = tuple(each for each in split if each is not None)
        if len(fast) == len(lanes):
            loads = self._loads(lanes, fast, rows)
            counts = deal_micro_batches(total, loads)
            if min(counts) > 0 and (fast, counts) != (layers, evenly(total, len(lanes))):
                yield _slowest(loads, counts), rows, lanes, fast, counts

    def _seconds(self, block: Block, rows: int) -> float:
        lengths = (self.problem.seq_length,) * rows
        return self.costs.layer(block.kind, block.tp, 1, self.links[block.kind], lengths).total

    def _loads(
        self, lanes: Sequence[Blocks], layers: Sequence[Sequence[int]], rows: int
    ) -> list[PipelineLoad]:
        found = []
        for lane, own in zip(lanes, layers, strict=True):
            each = [n * self._seconds(block, rows) for block, n in zip(lane, own, strict=True)]
            found.append(PipelineLoad(sum(each), max(each)))
        return found

    def _split(self, lane: Blocks, rows: int, micro_batches: int) -> tuple[int, ...] | None:
        key = (lane, rows, micro_batches)
        if key not in self._by_speed:
            loads = [StageLoad(0.0, self._seconds(block, rows)) for block in lane]
            self._by_speed[key] = split_layers(self.problem.config.num_layers, loads, micro_batches)
        return self._by_speed[key]


def _slowest(loads: Sequence[PipelineLoad], counts: Sequence[int]) -> float:
    return max(load.seconds(count) for load, count in zip(loads, counts, strict=True))


def dealings(problem: Problem) -> Iterator[tuple[Blocks, ...]]:
    """All devices as stages of pipelines, for every number of pipelines: nodes, or equal parts of them, by memory."""
    memory = {kind.name: kind.memory_bytes for kind in problem.cluster.kinds}
    seen: set[tuple[Blocks, ...]] = set()
    most = min(len(problem.cluster.devices), problem.global_batch_size)
    devices = len(problem.cluster.devices)
    numbers = [n for n in range(1, most + 1) if devices <= FEW or n <= ALL_NUMBERS or devices % n == 0]
    for pipelines in problem.choices.pipelines or numbers:
        for cut in CUTS:
            dealt = _dealt(problem.cluster, memory, pipelines, cut)
            if dealt is None:
                continue
            for lanes in _staged(problem, dealt):
                if lanes not in seen and all(len(lane) <= problem.config.num_layers for lane in lanes):
                    seen.add(lanes)
                    yield lanes


def _dealt(cluster: Cluster, memory: dict[str, int], pipelines: int, cut: int) -> list[Pieces] | None:
    """The nodes of each pipeline, each part to the pipeline with least memory so far; None where one has nothing."""
    sites: dict[tuple[str, int], int] = {}
    for device in cluster.devices:
        sites[device.kind, device.node] = sites.get((device.kind, device.node), 0) + 1
    parts = []
    for (kind, node), count in sites.items():
        each = cut if count % cut == 0 else 1
        parts += [(kind, node, count // each)] * each
    parts.sort(key=lambda part: (-part[2] * memory[part[0]], part[0], part[1]))
    held = [0] * pipelines
    owned: list[dict[tuple[str, int], int]] = [{} for _ in range(pipelines)]
    for kind, node, count in parts:
        least = min(range(pipelines), key=lambda p: (held[p], p))
        held[least] += count * memory[kind]
        owned[least][kind, node] = owned[least].get((kind, node), 0) + count
    if not all(owned):
        return None
    return sorted(tuple(sorted((kind, count) for (kind, _), count in own.items())) for own in owned)


def _staged(problem: Problem, dealt: Sequence[Pieces]) -> Iterator[tuple[Blocks, ...]]:
    """Every tuple of stages for every (kind, devices), every order of kinds; the same ones in all pipelines."""
    pieces = sorted({piece for own in dealt for piece in own})
    kinds = sorted({kind for kind, _ in pieces})
    options = []
    for _, count in pieces:
        own = [each for each in _tuples(count) if all(tp in problem.degrees for tp in each)]
        options.append(own)
    orders = list(permutations(kinds)) if len(kinds) <= MOST_ORDERED else [tuple(kinds), tuple(kinds[::-1])]
    combinations: Iterator[tuple[tuple[int, ...], ...]] = product(*options)
    if len(problem.cluster.devices) > FEW:
        combinations = islice(combinations, COMBINED)
    for chosen in combinations:
        stages = dict(zip(pieces, chosen, strict=True))
        for order in orders:
            yield tuple(
                tuple(
                    Block(kind, tp)
                    for wanted in order
                    for kind, count in own
                    if kind == wanted
                    for tp in stages[kind, count]
                )
                for own in dealt
            )


def _tuples(count: int) -> tuple[tuple[int, ...], ...]:
    """Of more than 8 devices, every 8 are one stage."""
    whole, rest = divmod(count, 8)
    if not rest and whole == 1:
        return TUPLES[8]
    return tuple(((8,) * whole + tail) for tail in (TUPLES[rest] if rest else ((),)))


def by_memory(problem: Problem, lane: Blocks) -> tuple[int, ...]:
    """Layers in proportion to the memory of each stage, one at least; what is left over goes to the largest rests."""
    memory = {kind.name: kind.memory_bytes for kind in problem.cluster.kinds}
    weights = [block.ranks * memory[block.kind] for block in lane]
    spare = problem.config.num_layers - len(lane)
    exact = [spare * weight / sum(weights) for weight in weights]
    layers = [1 + int(share) for share in exact]
    order = sorted(range(len(lane)), key=lambda s: (int(exact[s]) - exact[s], s))
    for s in order[: problem.config.num_layers - sum(layers)]:
        layers[s] += 1
    return tuple(layers)
