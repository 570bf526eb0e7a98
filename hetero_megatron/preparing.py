"""How far text is on its way to tokens: a bar in a terminal, else a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hetero_megatron.data.prepare import Progress

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_DRAWINGS = 0.1


@contextmanager
def preparing_bar(
    title: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """Show progress on stderr: a bar that is gone at the end, or a line every half minute where nobody looks."""
    console = console or Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield _lines(title, console, clock)
        return
    console.print(title, markup=False)
    columns = (BarColumn(20), DownloadColumn(), TextColumn("{task.fields[found]}"), TimeRemainingColumn())
    # Without a thread: processes are forked while the bar is shown.
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None, found="")
        drawn = clock() - _SECONDS_BETWEEN_DRAWINGS

        def show(progress: Progress) -> None:
            nonlocal drawn
            if clock() - drawn < _SECONDS_BETWEEN_DRAWINGS:
                return
            drawn = clock()
            bar.update(task, total=progress.total, completed=progress.done, found=_found(progress))
            bar.refresh()

        yield show


def _lines(title: str, console: Console, clock: Callable[[], float]) -> Callable[[Progress], None]:
    last = clock()

    def show(progress: Progress) -> None:
        nonlocal last
        if clock() - last >= _SECONDS_BETWEEN_LINES:
            last = clock()
            share = progress.done / max(1, progress.total)
            console.print(f"{title}: {share:.0%}, {_found(progress)}", markup=False)

    return show


def _found(progress: Progress) -> str:
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens"
