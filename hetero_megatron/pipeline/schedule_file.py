"""A schedule as a CSV table: one row per stage, its forwards and backwards in order (as torch's pipelining writes).

The first row names the columns; every other row is a pipeline, a stage, and that stage's actions, such as `F0`, `B3`, or
`F0.1` for chunk 1. Empty cells mean nothing. Sends and receives are not written: they follow from the order.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.plan import plan_tasks
from hetero_megatron.pipeline.schedule import Tasks, shape

COLUMNS = ("pipeline", "stage", "actions")


def write_csv(pipelines: Iterable[Tasks]) -> str:
    """The text of a schedule file; `read_csv` reads it back.

    >>> from hetero_megatron.pipeline.schedule import one_f_one_b
    >>> print(write_csv([one_f_one_b(2, 2)]), end="")
    pipeline,stage,actions
    0,0,F0,F1,B0,B1
    0,1,F0,B0,F1,B1
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, tasks in enumerate(pipelines):
        for stage, order in enumerate(tasks):
            writer.writerow([number, stage, *map(str, order)])
    return text.getvalue()


def read_csv(text: str, name: str) -> tuple[Tasks, ...]:
    """The compute actions of every stage of every pipeline; `name` is the file's, for errors.

    Raises:
        ScheduleError: a cell or row that is wrong or missing, with file and line; stages that would wait for each
            other, with the file and the printed grid.
    """
    try:
        rows = [next(csv.reader([line]), []) for line in text.removeprefix("\ufeff").splitlines()]
    except csv.Error as error:
        raise ScheduleError(f"{name} is no CSV file: {error}") from error
    first = [cell.strip() for cell in rows[0]] if rows else []
    while first and not first[-1]:
        first.pop()
    if tuple(first) != COLUMNS:
        raise ScheduleError(
            f"{name} line 1 is {','.join(first)!r}; the first line must be {','.join(COLUMNS)!r}"
        )
    pipelines: list[list[tuple[Action, ...]]] = []
    lines: list[list[int]] = []
    for line, row in enumerate(rows[1:], start=2):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        here = f"{name} line {line}"
        _check_place(here, cells, [len(stages) for stages in pipelines])
        if cells[1] == "0":
            pipelines.append([])
            lines.append([])
        pipelines[-1].append(tuple(_action(here, cell) for cell in cells[2:] if cell))
        lines[-1].append(line)
    if not pipelines:
        raise ScheduleError(f"{name} holds no pipeline; write a row for every stage")
    found = tuple(map(tuple, pipelines))
    for number, tasks in enumerate(found):
        _check_complete(name, lines[number], f"pipeline {number}", tasks)
    try:
        plan_tasks(name, [(tasks, max(1, shape(tasks)[1])) for tasks in found])
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error
    return found


def _check_place(here: str, cells: Sequence[str], stages: Sequence[int]) -> None:
    """Rows come in order: the next stage of the pipeline at hand, or stage 0 of the next pipeline."""
    place = tuple(cells[:2])
    allowed = [(len(stages) - 1, stages[-1])] if stages else []
    allowed.append((len(stages), 0))
    if place not in [(str(pipeline), str(stage)) for pipeline, stage in allowed]:
        expected = " or ".join(f"pipeline {pipeline} stage {stage}" for pipeline, stage in allowed)
        raise ScheduleError(
            f"{here} is for pipeline {cells[0]!r} stage {(*cells, '')[1]!r}, where {expected} is expected; "
            "every stage has one row, in order from 0"
        )


def _action(here: str, cell: str) -> Action:
    try:
        action = Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"{here}: {error}") from error
    if not action.is_compute:
        raise ScheduleError(
            f"{here}: {cell} communicates; write F and B only, messages follow from their order"
        )
    return action


def _check_complete(name: str, lines: Sequence[int], pipeline: str, tasks: Tasks) -> None:
    """Every stage has each F and B of the pipeline's micro-batches and chunks once."""
    micro_batches, chunks = shape(tasks)

    def every() -> Iterator[Action]:
        for micro_batch, chunk in product(range(micro_batches), range(chunks)):
            yield Action("F", micro_batch, chunk)
            yield Action("B", micro_batch, chunk)

    for stage, (line, order) in enumerate(zip(lines, tasks, strict=True)):
        here, seen = f"{name} line {line}: {pipeline} stage {stage}", set[Action]()
        for action in order:
            if action in seen:
                raise ScheduleError(f"{here} has {action} twice; once per micro-batch and chunk is right")
            seen.add(action)
        if missing := next((action for action in every() if action not in seen), None):
            raise ScheduleError(
                f"{here} has no {missing}; every stage of {pipeline} needs F and B of micro-batches 0 to "
                f"{micro_batches - 1}" + (f" in chunks 0 to {chunks - 1}" if chunks > 1 else "")
            )
