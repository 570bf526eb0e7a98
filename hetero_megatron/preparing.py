"""The bar that is shown while text becomes tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hetero_megatron.data.prepare import Progress


@contextmanager
def preparing_bar(title: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, in bytes of the source, with the documents and tokens found so far; gone at the end."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[found]}"),
        TimeRemainingColumn(),
    )
    # Without a thread: processes are forked while the bar is shown.
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(title, total=None, found="")

        def show(progress: Progress) -> None:
            found = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            bar.update(task, total=progress.total, completed=progress.done, found=found)
            bar.refresh()

        yield show
