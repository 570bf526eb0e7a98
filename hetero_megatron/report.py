"""What a run shows: the strategy as a table, Megatron-format log lines, a progress bar, and a summary."""

import math
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hetero_megatron.runtime.clock import KINDS
from hetero_megatron.runtime.session import StepResult
from hetero_megatron.strategy import Stage, Strategy

COLUMNS = 80
_NARROWEST_CELL = len("stage 0")


def rank_text(ranks: tuple[int, ...]) -> str:
    """`R0-3` for (0, 1, 2, 3), `R4` for (4,), `R0,4-6` for a list, in its order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "R" + ",".join(_run_text(run, len(runs) == 1) for run in runs)


def _run_text(run: list[int], alone: bool) -> str:
    """Two ranks of a longer list are not worth a dash."""
    return f"{run[0]}-{run[-1]}" if len(run) > 2 or (alone and len(run) > 1) else ",".join(map(str, run))


def layer_text(stage: Stage, first: bool, last: bool) -> str:
    """`L0-14`, or `L0-3,8-11` for several chunks, with what else the stage holds when it has no layer."""
    if not stage.chunks:
        return "embedding" if first else "head" if last else "none"
    return "L" + ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in stage.chunks)


def parallel_text(stage: Stage) -> str:
    """`TP4`, `TP4 CP2`, or `TP2+TP1` for context-parallel parts of different degree."""
    sizes = stage.tensor_parallel_sizes
    if len(set(sizes)) > 1:
        return "+".join(f"TP{size}" for size in sizes)
    return f"TP{sizes[0]}" + (f" CP{len(sizes)}" if len(sizes) > 1 else "")


def strategy_table(strategy: Strategy) -> Group:
    """The strategy as the paper's Table 9 prints one: a row per pipeline, a cell per tensor-parallel group.

    Deep pipelines are continued in further tables, which 80 columns have room for. Idle ranks are named below.
    """
    depth = max(len(p.stages) for p in strategy.pipelines)
    cells = (
        text
        for p in strategy.pipelines
        for n, stage in enumerate(p.stages)
        for text in _cell(stage, n == 0, n == len(p.stages) - 1).splitlines()
    )
    # A column takes three characters more than its widest cell, and the first column takes 17.
    abreast = max(1, (COLUMNS - 17) // (max(_NARROWEST_CELL, *map(len, cells)) + 3))
    tables = [
        _stages_table(strategy, range(first, min(first + abreast, depth)))
        for first in range(0, depth, abreast)
    ]
    idle = [f"idle: {rank_text(strategy.idle_ranks)}"] if strategy.idle_ranks else []
    return Group(*tables, *idle)


def _cell(stage: Stage, first: bool, last: bool) -> str:
    return f"{rank_text(stage.ranks)}\n{layer_text(stage, first, last)}\n{parallel_text(stage)}"


def _stages_table(strategy: Strategy, shown: range) -> Table:
    title = "strategy" if not shown.start else f"strategy, from stage {shown.start}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("micro-batches", no_wrap=True)
    for number in shown:
        table.add_column(f"stage {number}", justify="center")
    for pipeline in strategy.pipelines:
        stages = pipeline.stages
        cells = [_cell(stage, n == 0, n == len(stages) - 1) for n, stage in enumerate(stages) if n in shown]
        depths = f"({len(stages)} stage{'s' if len(stages) > 1 else ''})"
        head = f"{pipeline.micro_batches} x bs{pipeline.micro_batch_size}\n{depths}"
        table.add_row(head, *cells, *[""] * (len(shown) - len(cells)))
    return table


def short_strategy(strategy: Strategy) -> str:
    """One word for log lines: tensor-parallel degrees by stage, pipelines joined with '+', as `TP2>TP1+TP1`."""
    return "+".join(
        ">".join(parallel_text(s).replace(" ", "").replace("+", "&") for s in p.stages)
        for p in strategy.pipelines
    )


def log_line(
    result: StepResult, train_iters: int, global_batch_size: int, skipped: int, strategy: str
) -> str:
    """One line in Megatron's format, with ` strategy | tokens/s | bubble ` appended."""
    seconds = result.seconds["step"]
    parts = [
        f" iteration {result.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {result.iteration * global_batch_size:12d}",
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
        f"learning rate: {result.lr:.6E}",
        f"global batch size: {global_batch_size:5d}",
        f"lm loss: {result.loss:.6E}",
        f"grad norm: {result.grad_norm:.3f}",
        f"number of skipped iterations: {skipped:3d}",
        f"number of nan iterations: {int(not math.isfinite(result.grad_norm)):3d}",
        f"strategy: {strategy}",
        f"tokens/s: {result.valid_tokens / seconds:.0f}",
        f"bubble: {100 * result.seconds['bubble'] / seconds:.1f}%",
    ]
    note = f"\n  step {result.iteration} made no update: {result.skipped}" if result.skipped else ""
    return " | ".join(parts) + " |" + note


class RunProgress:
    """A progress bar that log lines scroll past; silent on ranks that do not lead, plain where there is no terminal."""

    def __init__(self, train_iters: int, shown: bool) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._shown = shown
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"),
        )
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=not (shown and self._console.is_terminal)
        )
        self._task = self._bar.add_task("training", total=train_iters, loss="-")

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, result: StepResult) -> None:
        """One step is done."""
        self._bar.update(self._task, advance=1, loss=f"{result.loss:.4f}")

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._console.print(text)


class RunSummary:
    """Figures of a whole run, for its end."""

    def __init__(self, flops_per_token: int) -> None:
        self.flops_per_token = flops_per_token
        self.losses: list[float] = []
        self.tokens = 0
        self.seconds = dict.fromkeys((*KINDS, "step"), 0.0)

    def add(self, result: StepResult) -> None:
        """Count one step."""
        if not result.skipped:
            self.losses.append(result.loss)
        self.tokens += result.valid_tokens
        for kind in self.seconds:
            self.seconds[kind] += result.seconds[kind]

    def print(self, folder: Path) -> None:
        """The summary as a table, and where the files are."""
        table = Table(title="run", title_justify="left", show_header=False)
        if self.losses:
            table.add_row("loss, first and last step", f"{self.losses[0]:.4f} -> {self.losses[-1]:.4f}")
        step = self.seconds["step"] or 1.0
        table.add_row("tokens/s (targets that count)", f"{self.tokens / step:.0f}")
        table.add_row("model FLOP/s, all ranks", f"{self.flops_per_token * self.tokens / step:.3g}")
        shares = {kind: self.seconds[kind] / step for kind in KINDS}
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        table.add_row(
            "time, average rank", "\n".join(f"{100 * s:5.1f}% {kind}" for kind, s in shares.items())
        )
        table.add_row("steps", f"{len(self.losses)} in {self.seconds['step']:.1f} s")
        console = Console()
        console.print(table)
        # Outside the table, which would cut a long path.
        console.print(
            f"files: {folder / 'metrics.jsonl'}", soft_wrap=True, highlight=False, markup=False, emoji=False
        )
