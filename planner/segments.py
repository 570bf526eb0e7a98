"""Gradients and parameters between replicas at the end of a step (paper §6.1; DESIGN decisions 4 and 5).

Layers that the same stages of all pipelines hold form a segment: they are reduced together, by all context-parallel
parts of these stages. Reduction starts inside the last backward pass where there are several buckets, from the last
layer to the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster, Link
from hetero_megatron.planner.profiles import Operation, Profiles
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.work import FP32, Work
from hetero_megatron.strategy import Strategy

BUCKET_ELEMENTS = 40_000_000
"""Elements of the full tensors that travel together, unless a recipe says otherwise."""

Member = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers (or the embedding, or the head) that the same stages hold.

    Attributes:
        members: the stage of every pipeline that holds them; both ends of it where a tied table is on both.
        layers: how many; 0 for the embedding and the head.
        reduce, gather: seconds of their gradients and, under ZeRO-1, of their parameters.
        pieces: buckets that they make.
        alike: whether one collective does it, since all members cut the layers alike.
        early: whether a backward pass makes these gradients before those of its layers: the head's.
    """

    members: tuple[Member, ...]
    layers: int
    reduce: float
    gather: float
    pieces: int
    alike: bool
    early: bool = False


@dataclass(frozen=True, slots=True)
class Sync:
    """Seconds per pipeline and stage.

    Attributes:
        reduce: of gradients, whether exposed or not.
        behind: of parameters that arrive behind the next step's first forward pass.
        exposed: of parameters that all wait for, because no single collective brings them.
    """

    reduce: tuple[tuple[float, ...], ...]
    behind: tuple[tuple[float, ...], ...]
    exposed: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(strategy: Strategy, segments: Sequence[Segment]) -> "Sync":
        """The sums of all segments."""
        sums = [[[0.0] * len(p.stages) for p in strategy.pipelines] for _ in range(3)]
        for segment in segments:
            for pipeline, stage in set(segment.members):
                sums[0][pipeline][stage] += segment.reduce
                sums[1 if segment.alike else 2][pipeline][stage] += segment.gather
        reduce, behind, exposed = (tuple(tuple(own) for own in each) for each in sums)
        return Sync(reduce, behind, exposed)


def segments_of(
    strategy: Strategy,
    cluster: Cluster,
    work: Work,
    profiles: Profiles,
    item: int,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> tuple[Segment, ...]:
    """All segments, in forward order; none where there is one replica of everything."""
    config = work.config
    pipelines = strategy.pipelines
    if sum(len(p.stages[0].parts) for p in pipelines) < 2 and not config.tie_word_embeddings:
        return ()
    links: dict[tuple[int, ...], Link] = {}

    def segment(
        members: tuple[Member, ...], elements: float, layers: int, early: bool = False
    ) -> Segment | None:
        stages = [pipelines[pipeline].stages[stage] for pipeline, stage in members]
        replicas = sum(len(stage.parts) for stage in stages)
        if replicas < 2:
            return None
        sizes = {size for stage in stages for size in stage.tensor_parallel_sizes}
        leaders = tuple(part[0] for stage in stages for part in stage.parts)
        if leaders not in links:
            links[leaders] = _slowest(cluster, leaders)
        local, link = elements / min(sizes), links[leaders]
        if link.shared:
            # All ranks of a part reduce their shards over the adapter of their node.
            local = float(elements)
        how: Operation = "reduce_scatter" if strategy.zero else "all_reduce"
        gather = (
            profiles.transfer_seconds(link, "all_gather", replicas, item * local) if strategy.zero else 0.0
        )
        return Segment(
            members,
            layers,
            profiles.transfer_seconds(link, how, replicas, FP32 * local),
            gather,
            max(1, min(layers, round(elements / bucket_elements))),
            len(sizes) == 1,
            early,
        )

    depth = [len(p.stages) - 1 for p in pipelines]
    first = tuple((number, 0) for number in range(len(pipelines)))
    last = tuple((number, stage) for number, stage in enumerate(depth))
    found = []
    if config.tie_word_embeddings:
        found.append(segment(tuple(dict.fromkeys(first + last)), work.table, 0))
    else:
        found.append(segment(first, work.table, 0))
    found += [segment(members, layers * work.layer_parameters, layers) for members, layers in _runs(strategy)]
    if not config.tie_word_embeddings:
        found.append(segment(last, work.table + config.hidden_size, 0, work.table >= bucket_elements))
    return tuple(each for each in found if each is not None)


def _runs(strategy: Strategy) -> Iterator[tuple[tuple[Member, ...], int]]:
    """(members, number of layers) of every run of layers without a border in any pipeline."""
    borders: dict[int, list[Member]] = {}
    end = 0
    for number, pipeline in enumerate(strategy.pipelines):
        for place, stage in enumerate(pipeline.stages):
            for lo, hi in stage.chunks:
                borders.setdefault(lo, []).append((number, place))
                end = max(end, hi + 1)
    now = dict.fromkeys(range(len(strategy.pipelines)), 0)
    starts = sorted(borders)
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        now.update(borders[start])
        yield tuple(now.items()), stop - start


def _slowest(cluster: Cluster, ranks: Sequence[int]) -> Link:
    links = [cluster.link(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True) if a != b]
    return min(links, key=bytes_per_second)


Reduced = tuple[Segment, float, float]
"""A segment, and when its reduction starts and ends."""


def reductions(
    segments: Sequence[Segment], ends: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]
) -> list[Reduced]:
    """When every segment is reduced, given when every stage's last backward ends and how long that takes.

    A stage reduces its segments one after the other, last layers first; all members of a segment start together.
    """
    free: dict[Member, float] = {}
    layers: dict[Member, int] = {}
    done: dict[Member, int] = {}
    for segment in segments:
        for member in set(segment.members):
            layers[member] = layers.get(member, 0) + segment.layers
    found = []
    for segment in reversed(segments):
        begin = complete = 0.0
        for member in segment.members:
            end, last = ends[member[0]][member[1]], backward[member[0]][member[1]]
            own, before = max(1, layers[member]), done.get(member, 0)
            done[member] = before + segment.layers
            if segment.layers:
                first = end - last * (1 - min(1.0, (before + segment.layers / segment.pieces) / own))
                whole = end - last * (1 - min(1.0, done[member] / own))
            else:
                first = whole = end - last if segment.early else end
            begin = max(begin, free.get(member, 0.0), first)
            complete = max(complete, whole)
        over = max(begin + segment.reduce, complete + segment.reduce / segment.pieces)
        free.update(dict.fromkeys(segment.members, over))
        found.append((segment, begin, over))
    return found


def finish(reduced: Sequence[Reduced], ends: Sequence[Sequence[float]]) -> list[list[float]]:
    """When every stage has computed all and has all its gradients."""
    found = [list(own) for own in ends]
    for segment, _, over in reduced:
        for pipeline, stage in segment.members:
            found[pipeline][stage] = max(found[pipeline][stage], over)
    return found
