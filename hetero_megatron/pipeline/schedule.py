"""Pipeline schedules: the order of forwards and backwards on every stage (paper §6.3).

A new schedule is one function and one row of `SCHEDULES`. A stage holds `chunks` parts of the model; only the
interleaved schedule runs more than one, and says in every action which.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action

Tasks = tuple[tuple[Action, ...], ...]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Tasks:
    """All forwards, then all backwards: keeps every micro-batch's activations on every stage.

    Raises:
        ScheduleError: there are several chunks.
    """
    _one_chunk("gpipe", chunks)
    order = _forwards(0, micro_batches) + _backwards(0, micro_batches)
    return (order,) * stages


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Tasks:
    """1F1B: stage s runs ahead by min(micro_batches, stages - 1 - s) forwards, then alternates, then drains.

    Raises:
        ScheduleError: there are several chunks.

    >>> [" ".join(map(str, stage)) for stage in one_f_one_b(2, 2)]
    ['F0 F1 B0 B1', 'F0 B0 F1 B1']
    """
    _one_chunk("1f1b", chunks)
    forwards, backwards = _forwards(0, micro_batches), _backwards(0, micro_batches)
    return tuple(_alternate(forwards, backwards, stages - 1 - stage) for stage in range(stages))


def interleaved(stages: int, micro_batches: int, chunks: int) -> Tasks:
    """Interleaved 1F1B (Megatron's): the model passes every stage `chunks` times, a chunk of it each time.

    Groups of `stages` micro-batches pass chunk by chunk, so that a group comes back to stage 0 just when its last
    micro-batch has left it. Stage s runs ahead by 2 * (stages - 1 - s) + (chunks - 1) * stages forwards, then
    alternates, then drains. A last group that is short keeps the order of a full one, with the micro-batches that
    it lacks left out: counted as if it were full, the run-ahead would make stages wait for each other.

    Raises:
        ScheduleError: there is one stage, or one chunk.

    >>> [" ".join(map(str, stage)) for stage in interleaved(2, 2, 2)]
    ['F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1', 'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1']
    """
    if stages < 2 or chunks < 2:
        raise ScheduleError(
            f"schedule interleaved: {_count(stages, 'stage')} and {_count(chunks, 'chunk')} per stage; it needs "
            "2 or more of both; with one chunk per stage use 1f1b, and one stage holds all its layers in one chunk"
        )
    passes = _passes(stages, micro_batches, chunks)
    forwards = tuple(Action("F", micro_batch, chunk) for micro_batch, chunk in passes)
    backwards = tuple(Action("B", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in passes)
    return tuple(
        tuple(action for action in order if action.micro_batch < micro_batches)
        for stage in range(stages)
        for order in [_alternate(forwards, backwards, 2 * (stages - 1 - stage) + (chunks - 1) * stages)]
    )


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Tasks:
    """What evaluation runs: all forwards and no backward, whichever schedule trains.

    With several chunks, groups of `stages` micro-batches pass chunk by chunk, as in the interleaved schedule.

    >>> [" ".join(map(str, stage)) for stage in forward_only(2, 3, 2)]
    ['F0 F1 F0.1 F1.1 F2 F2.1', 'F0 F1 F0.1 F1.1 F2 F2.1']
    """
    passes = _passes(stages, micro_batches, chunks)
    order = tuple(Action("F", number, chunk) for number, chunk in passes if number < micro_batches)
    return (order,) * stages


SCHEDULES: Mapping[str, Callable[[int, int, int], Tasks]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def tasks(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Tasks:
    """Compute actions per stage of the schedule called `name`; none where there are no micro-batches.

    Raises:
        ScheduleError: the name is unknown, the counts are no counts, or the schedule is not for so many chunks.
    """
    check_name(name)
    if stages < 1 or micro_batches < 0 or chunks < 1:
        raise ScheduleError(
            f"schedule {name}: {stages} stages, {micro_batches} micro-batches and {chunks} chunks per stage; "
            "at least 1 stage, 0 micro-batches and 1 chunk"
        )
    return SCHEDULES[name](stages, micro_batches, chunks)


def shape(order: Tasks) -> tuple[int, int]:
    """(micro-batches, chunks per stage) of a pipeline's tasks; (0, 0) where there are none."""
    actions = [action for stage in order for action in stage]
    micro_batches = 1 + max((action.micro_batch for action in actions), default=-1)
    return micro_batches, 1 + max((action.chunk for action in actions), default=-1)


def check_name(name: str) -> None:
    """Refuse a name that is not in `SCHEDULES`.

    Raises:
        ScheduleError: with the nearest name.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 1)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEDULES)}"
        raise ScheduleError(f"schedule {name!r} is unknown; {known}")


def _passes(stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of groups of `stages` micro-batches, chunk by chunk; the last group counted as full."""
    padded = -(-micro_batches // stages) * stages
    return [
        (micro_batch, chunk)
        for first in range(0, padded, stages)
        for chunk in range(chunks)
        for micro_batch in range(first, first + stages)
    ]


def _one_chunk(name: str, chunks: int) -> None:
    if chunks > 1:
        raise ScheduleError(
            f"schedule {name} runs one chunk per stage, not {chunks}; for several use interleaved"
        )


def _alternate(forwards: tuple[Action, ...], backwards: tuple[Action, ...], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards (or all, if there are fewer), then one forward and one backward in turn, then the rest."""
    warm_up = min(len(forwards), ahead)
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = tuple(action for pair in pairs for action in pair)
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _forwards(first: int, end: int) -> tuple[Action, ...]:
    return tuple(Action("F", micro_batch) for micro_batch in range(first, end))


def _backwards(first: int, end: int) -> tuple[Action, ...]:
    return tuple(Action("B", micro_batch) for micro_batch in range(first, end))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
