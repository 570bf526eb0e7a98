"""Run a CommPlan on tensors: the executor of every Reshard (paper §5).

An `Exchange` is compiled once per plan, rank and shapes: regions become slices, and steps of one kind and group
over several tensors become one message. Sizes here are local unless a name says `full`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_megatron.annotation import Annotation
from hetero_megatron.annotation.region import Bounds
from hetero_megatron.comm.steps import Collective, CommPlan, Copy, Stage, Transfer
from hetero_megatron.runtime import pair
from hetero_megatron.runtime.slices import Shape, Slices, Tensors, count, covers, located, pack, unpack
from hetero_megatron.runtime.world import Groups

Finish = Callable[[], None]
Operation = Callable[[Tensors, Tensors, Tensor | None, bool], Finish | None]
"""From inputs to outputs, given their one flat buffer if there is one; whether to return before it is done.

An operation that returns a function is done when that function has run.
"""


# torch 2.13 gave these two a new name and warns about the old one.
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_PAIR_OPERATIONS: dict[str, pair.Combine] = {
    "sum": Tensor.add_,
    "max": lambda tensor, other: torch.maximum(tensor, other, out=tensor),
}


class Exchange:
    """One CommPlan for one rank and fixed full shapes; several tensors with the same plan travel together."""

    def __init__(
        self,
        plan: CommPlan,
        rank: int,
        groups: Groups,
        full_shapes: Sequence[Shape],
        meets_at_once: bool = False,
    ) -> None:
        """`meets_at_once`: all ranks come to this exchange together, as the ranks of a stage do.

        Then two CPU ranks may exchange small messages directly. Where a peer comes only when this rank has gone on, as
        with gradients of a backward pass that is not over, even to post the first message could wait for it.
        """
        self.plan = plan
        self._stages: list[_CompiledStage] = []
        before = plan.src
        for stage in plan.stages:
            self._stages.append(_compile(before, stage, rank, groups, full_shapes, meets_at_once))
            before = stage.after

    def run(self, tensors: Tensors, flat: Tensor | None = None) -> list[Tensor]:
        """Exchange `tensors` (local shards by plan.src) and return the shards by plan.dst.

        Sums are made in place in the inputs where the layout allows it. `flat` is the one buffer whose
        consecutive views the tensors are, if there is one.
        """
        return self._run(list(tensors), flat, self._stages)

    def start(self, tensors: Tensors, flat: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Like `run`, but returns before the first stage is done if that is made of collectives.

        The function that is returned waits for it, runs the other stages and gives the result. Ranks must start
        their exchanges in one order and finish them in one order. Transfers are not started early: on a transport
        without tags they could meet the messages of a pipeline.
        """
        current, stages = list(tensors), self._stages
        if not stages or not stages[0].is_collective:
            return lambda: self._run(current, flat, stages)
        first, *rest = stages
        result = first.outputs(current)
        waiting = [op(current, result, flat if first.in_place else None, True) for op in first.operations]

        def finish() -> list[Tensor]:
            for end in waiting:
                if end is not None:
                    end()
            return self._run(result, flat if first.in_place else None, rest)

        return finish

    @property
    def is_one_collective(self) -> bool:
        """Whether a started exchange ends without this rank doing anything more with others."""
        return len(self._stages) == 1 and self._stages[0].is_collective

    @staticmethod
    def _run(current: list[Tensor], flat: Tensor | None, stages: Sequence["_CompiledStage"]) -> list[Tensor]:
        for stage in stages:
            result = stage.outputs(current)
            flat = flat if stage.in_place else None
            for operation in stage.operations:
                operation(current, result, flat, False)
            current = result
        return current


@dataclass(frozen=True, slots=True)
class _CompiledStage:
    operations: tuple[Operation, ...]
    output_shapes: tuple[Shape, ...]
    in_place: bool
    is_collective: bool

    def outputs(self, inputs: list[Tensor]) -> list[Tensor]:
        """Where the stage's results go."""
        if self.in_place:
            return inputs
        like = inputs[0] if inputs else None
        return [_empty(shape, like) for shape in self.output_shapes]


def _empty(shape: Shape, like: Tensor | None) -> Tensor:
    assert like is not None, "a rank that receives tensors also holds some to take dtype and device from"
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _compile(
    before: Annotation, stage: Stage, rank: int, groups: Groups, shapes: Sequence[Shape], direct: bool
) -> _CompiledStage:
    """Regions to slices, for every tensor."""
    inside = [_bounds(before, rank, shape) for shape in shapes]
    outside = [_bounds(stage.after, rank, shape) for shape in shapes]
    sums_only = all(isinstance(step, Collective) and step.kind == "all_reduce" for step in stage.steps)
    in_place = stage.in_place or (sums_only and inside == outside)
    operations: list[Operation] = []
    # Of the whole stage, not of this rank's part: ranks must agree on what they start early.
    is_collective = not any(isinstance(step, Transfer) for step in stage.steps)
    moves: list[Copy | Transfer] = []
    for step in stage.steps:
        if isinstance(step, Collective):
            if rank in step.ranks:
                operations.append(_collective(step, rank, groups, shapes, inside, outside, direct))
        elif rank in _ends(step):
            moves.append(step)
    if moves:
        operations.append(_moves(moves, rank, groups, shapes, inside, outside))
    return _CompiledStage(
        tuple(operations), tuple(_size(bounds) for bounds in outside), in_place, is_collective
    )


def _ends(step: Copy | Transfer) -> tuple[int, ...]:
    return (step.rank,) if isinstance(step, Copy) else (step.src, step.dst)


def _bounds(annotation: Annotation, rank: int, shape: Shape) -> Bounds:
    if annotation.subgroup_of(rank) is None:
        return tuple((0, 0) for _ in shape)
    return annotation.region(rank).bounds(shape)


def _size(bounds: Bounds) -> Shape:
    return tuple(hi - lo for lo, hi in bounds)


def _collective(
    step: Collective,
    rank: int,
    groups: Groups,
    shapes: Sequence[Shape],
    inside: list[Bounds],
    outside: list[Bounds],
    direct: bool,
) -> Operation:
    group = groups[step.ranks]
    if step.kind == "all_reduce":
        reads = located(step.region, shapes, inside)
        writes = located(step.region, shapes, outside)
        whole = all(covers(part, shard) for part, shard in zip(reads, inside, strict=True))
        return _all_reduce(group, reads, writes, whole, direct)
    assert step.dim is not None, "reduce_scatter and all_gather have a dim"
    # torch.distributed numbers a group's members by ascending rank, the plan in its own order.
    members = sorted(step.ranks)
    pieces = [step.piece(member) for member in members]
    me = members.index(rank)
    if step.kind == "reduce_scatter":
        reads_by = [located(p, shapes, inside) for p in pieces]
        writes = located(pieces[me], shapes, outside)
        return _reduce_scatter(group, reads_by, writes, _is_rows(reads_by, inside, writes, outside), direct)
    reads = located(pieces[me], shapes, inside)
    writes_by = [located(p, shapes, outside) for p in pieces]
    return _all_gather(group, reads, writes_by, me, _is_rows(writes_by, outside, reads, inside), direct)


def _after(work: dist.Work | None, then: Finish | None = None) -> Finish | None:
    """What is left to do: `then` now, or both later when there is something to wait for."""
    if work is None:
        if then is not None:
            then()
        return None

    def finish() -> None:
        work.wait()
        if then is not None:
            then()

    return finish


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: str = "sum", later: bool = False, direct: bool = True
) -> Finish | None:
    """Reduce a contiguous `tensor` in place by "sum" or "max"; with `later`, the function returned ends it."""
    if direct and pair.suits(group, tensor):
        return _now(pair.all_reduce(tensor, group, _PAIR_OPERATIONS[op]), later)
    return _after(dist.all_reduce(tensor, _OPERATIONS[op], group=group, async_op=later))


# Whether rows lie ready or must be packed differs from rank to rank, the bytes that travel do not: what decides how
# they travel is asked here alone, so that both ends of a pair agree.


def _reduce_scatter_rows(
    result: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool, direct: bool
) -> Finish | None:
    """The sum of this rank's rows of `tensor`; both contiguous, equally many rows for every rank."""
    if direct and pair.suits(group, tensor):
        return _now(pair.reduce_scatter(result, tensor, group), later)
    return _after(reduce_scatter_into(result, tensor, group=group, async_op=later))


def _all_gather_rows(
    result: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool, direct: bool
) -> Finish | None:
    """All ranks' rows; both contiguous, equally many rows from every rank."""
    if direct and pair.suits(group, result):
        return _now(pair.all_gather(result, tensor, group), later)
    return _after(all_gather_into(result, tensor, group=group, async_op=later))


def _now(finish: Finish, later: bool) -> Finish | None:
    """Finish, unless it may be later."""
    if later:
        return finish
    finish()
    return None


def _all_reduce(
    group: dist.ProcessGroup, reads: list[Slices], writes: list[Slices], whole: bool, direct: bool
) -> Operation:
    def run(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> Finish | None:
        if whole and flat is not None:
            return all_reduce(flat, group, later=later, direct=direct)
        if whole and len(inputs) == 1 and inputs[0] is outputs[0] and inputs[0].is_contiguous():
            return all_reduce(inputs[0], group, later=later, direct=direct)
        buffer = pack(inputs, reads)
        buffer = buffer.clone() if len(inputs) == 1 else buffer
        finish = all_reduce(buffer, group, later=True, direct=direct)
        assert finish is not None, "what is started early has an end"

        def spread() -> None:
            finish()
            unpack(buffer, outputs, writes)

        return _now(spread, later)

    return run


def _reduce_scatter(
    group: dist.ProcessGroup, reads_by: list[list[Slices]], writes: list[Slices], rows: bool, direct: bool
) -> Operation:
    counts = [count(reads) for reads in reads_by]
    longest = max(counts)

    def run(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> Finish | None:
        del flat
        buffer = inputs[0].new_zeros(longest * len(counts))
        for place, reads in enumerate(reads_by):
            buffer[place * longest : place * longest + counts[place]] = pack(inputs, reads)
        mine = buffer.new_empty(longest)
        finish = _reduce_scatter_rows(mine, buffer, group, True, direct)

        def spread() -> None:
            if finish is not None:
                finish()
            unpack(mine, outputs, writes)

        return _now(spread, later)

    def run_rows(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> Finish | None:
        """Equal pieces of one contiguous tensor along dim 0: nothing to pack."""
        if inputs[0].is_contiguous() and outputs[0].is_contiguous():
            return _reduce_scatter_rows(outputs[0], inputs[0], group, later, direct)
        return run(inputs, outputs, flat, later)

    return run_rows if rows else run


def _all_gather(
    group: dist.ProcessGroup,
    reads: list[Slices],
    writes_by: list[list[Slices]],
    me: int,
    rows: bool,
    direct: bool,
) -> Operation:
    counts = [count(writes) for writes in writes_by]
    longest = max(counts)

    def run(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> Finish | None:
        del flat
        mine = inputs[0].new_zeros(longest)
        mine[: counts[me]] = pack(inputs, reads)
        buffer = mine.new_empty(longest * len(counts))
        finish = _all_gather_rows(buffer, mine, group, True, direct)

        def spread() -> None:
            if finish is not None:
                finish()
            for place, writes in enumerate(writes_by):
                unpack(buffer[place * longest : place * longest + counts[place]], outputs, writes)

        return _now(spread, later)

    def run_rows(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> Finish | None:
        """Equal pieces of one contiguous tensor along dim 0: nothing to unpack."""
        if outputs[0].is_contiguous():
            return _all_gather_rows(outputs[0], inputs[0].contiguous(), group, later, direct)
        return run(inputs, outputs, flat, later)

    return run_rows if rows else run


def _is_rows(
    pieces: list[list[Slices]], whole: list[Bounds], mine: list[Slices], shard: list[Bounds]
) -> bool:
    """Whether one tensor is just the pieces' rows, equally many each, and the other shard is just one piece."""
    if (
        len(whole) != 1
        or not covers(mine[0], shard[0])
        or len({piece[0][0].stop - piece[0][0].start for piece in pieces}) > 1
    ):
        return False
    sizes = [hi - lo for lo, hi in whole[0]]
    at = 0
    for piece in pieces:
        rows, *rest = piece[0]
        if rows.start != at or any(
            (span.start, span.stop) != (0, size) for span, size in zip(rest, sizes[1:], strict=True)
        ):
            return False
        at = rows.stop
    return at == sizes[0]


def _moves(
    steps: Sequence[Copy | Transfer],
    rank: int,
    groups: Groups,
    shapes: Sequence[Shape],
    inside: list[Bounds],
    outside: list[Bounds],
) -> Operation:
    """Copies and one message per peer, posted together."""
    copies = [
        (located(step.region, shapes, inside), located(step.region, shapes, outside))
        for step in steps
        if isinstance(step, Copy)
    ]
    sends: dict[int, list[Slices]] = {}
    receives: dict[int, list[Slices]] = {}
    for step in steps:
        if isinstance(step, Transfer) and step.src == rank:
            sends.setdefault(groups.world.index(step.dst), []).extend(located(step.region, shapes, inside))
        elif isinstance(step, Transfer):
            receives.setdefault(groups.world.index(step.src), []).extend(
                located(step.region, shapes, outside)
            )

    def run(inputs: Tensors, outputs: Tensors, flat: Tensor | None, later: bool) -> None:
        del flat, later
        posted: list[dist.P2POp] = []
        landed: list[tuple[Tensor, list[Slices]]] = []
        for peer, slices in sends.items():
            message = pack(_repeated(inputs, slices), slices).contiguous()
            posted.append(dist.P2POp(dist.isend, message, peer))
        for peer, slices in receives.items():
            buffer = outputs[0].new_empty(count(slices))
            landed.append((buffer, slices))
            posted.append(dist.P2POp(dist.irecv, buffer, peer))
        work = dist.batch_isend_irecv(posted) if posted else []
        for source, target in copies:
            for tensor, result, read, write in zip(inputs, outputs, source, target, strict=True):
                if tensor is not result:
                    result[write].copy_(tensor[read])
        for handle in work:
            handle.wait()
        for buffer, slices in landed:
            unpack(buffer, _repeated(outputs, slices), slices)

    return run


def _repeated(tensors: Tensors, slices: list[Slices]) -> list[Tensor]:
    """The tensors again and again: a message holds, region after region, a slice of each."""
    return list(tensors) * (len(slices) // len(tensors))
