"""Which rows of a step each pipeline's micro-batches take, uneven counts too (paper Tables 9-16)."""

from collections.abc import Sequence

from hetero_megatron.errors import DataError

MicroBatchRows = tuple[int, ...]


def deal(
    global_batch_size: int, pipelines: Sequence[tuple[int, int]]
) -> tuple[tuple[MicroBatchRows, ...], ...]:
    """Row offsets [0, global_batch_size) of one step, per pipeline and micro-batch, in contiguous runs.

    `pipelines` holds (micro_batches, micro_batch_size) each. All micro-batches get equally many rows where
    their limit allows; rows that are left over go to the first micro-batch of every pipeline, then to the
    second, and so on: larger micro-batches come first, and pipelines differ as little as possible.

    Raises:
        DataError: the rows do not fit, or some micro-batch would be empty.

    >>> deal(8, [(3, 3)])
    (((0, 1, 2), (3, 4, 5), (6, 7)),)
    """
    count = sum(micro_batches for micro_batches, _ in pipelines)
    room = sum(micro_batches * size for micro_batches, size in pipelines)
    told = " + ".join(f"{micro_batches} x {size}" for micro_batches, size in pipelines) or "no pipeline"
    if global_batch_size < 1:
        raise DataError(f"global_batch_size is {global_batch_size}; a step needs 1 row or more")
    if global_batch_size > room:
        raise DataError(
            f"global_batch_size {global_batch_size} does not fit: the pipelines take at most {told} = {room} "
            f"rows a step (micro_batches x micro_batch_size each)"
        )
    if global_batch_size < count:
        raise DataError(
            f"global_batch_size {global_batch_size} leaves micro-batches empty: the pipelines run {count} "
            f"micro-batches a step ({told}), and each needs a row"
        )
    dealt: list[tuple[MicroBatchRows, ...]] = []
    first = 0
    for sizes in _sizes(global_batch_size, pipelines):
        rows: list[MicroBatchRows] = []
        for size in sizes:
            rows.append(tuple(range(first, first + size)))
            first += size
        dealt.append(tuple(rows))
    return tuple(dealt)


def deal_tail(rows: int, pipelines: Sequence[tuple[int, int]]) -> tuple[tuple[MicroBatchRows, ...], ...]:
    """`deal` for a step that is not full: micro-batches that get no row are left out, of whole pipelines too.

    Raises:
        DataError: the rows do not fit.

    >>> deal_tail(1, [(3, 2), (1, 2)])
    (((0,),), ())
    """
    if rows >= sum(micro_batches for micro_batches, _ in pipelines):
        return deal(rows, pipelines)
    sizes = _sizes(rows, pipelines)
    first = iter(range(rows))
    return tuple(tuple((next(first),) for size in own if size) for own in sizes)


def _sizes(rows: int, pipelines: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows per micro-batch: everyone up to a common level, what is left one by one across the pipelines."""
    level = 0
    while sum(count * min(size, level + 1) for count, size in pipelines) <= rows and level < rows:
        level += 1
    sizes = [[min(size, level)] * count for count, size in pipelines]
    left = rows - sum(map(sum, sizes))
    for turn in range(max(count for count, _ in pipelines)):
        for (count, size), own in zip(pipelines, sizes, strict=True):
            if left and turn < count and own[turn] < size:
                own[turn] += 1
                left -= 1
    return sizes
