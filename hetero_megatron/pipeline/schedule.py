"""Pipeline schedules: the order of forwards and backwards on every stage (paper §6.3).

A new schedule is one function and one row of `SCHEDULES`. One that interleaves sets `chunk` in its actions.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action

Tasks = tuple[tuple[Action, ...], ...]


def gpipe(stages: int, micro_batches: int) -> Tasks:
    """All forwards, then all backwards: keeps every micro-batch's activations on every stage."""
    order = _forwards(0, micro_batches) + _backwards(0, micro_batches)
    return (order,) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Tasks:
    """1F1B: stage s runs ahead by min(micro_batches, stages - 1 - s) forwards, then alternates, then drains.

    >>> [" ".join(map(str, stage)) for stage in one_f_one_b(2, 2)]
    ['F0 F1 B0 B1', 'F0 B0 F1 B1']
    """
    return tuple(_alternate(min(micro_batches, stages - 1 - stage), micro_batches) for stage in range(stages))


SCHEDULES: Mapping[str, Callable[[int, int], Tasks]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def tasks(name: str, stages: int, micro_batches: int) -> Tasks:
    """Compute actions per stage of the schedule called `name`; none where there are no micro-batches.

    Raises:
        ScheduleError: the name is unknown, or the counts are no counts.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 1)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEDULES)}"
        raise ScheduleError(f"schedule {name!r} is unknown; {known}")
    if stages < 1 or micro_batches < 0:
        raise ScheduleError(
            f"schedule {name}: {stages} stages and {micro_batches} micro-batches; "
            "at least 1 stage and 0 micro-batches"
        )
    return SCHEDULES[name](stages, micro_batches)


def _alternate(warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    steady: list[Action] = []
    for done in range(micro_batches - warm_up):
        steady += (Action("F", warm_up + done), Action("B", done))
    return _forwards(0, warm_up) + tuple(steady) + _backwards(micro_batches - warm_up, micro_batches)


def _forwards(first: int, end: int) -> tuple[Action, ...]:
    return tuple(Action("F", micro_batch) for micro_batch in range(first, end))


def _backwards(first: int, end: int) -> tuple[Action, ...]:
    return tuple(Action("B", micro_batch) for micro_batch in range(first, end))
