"""What a run shows: the strategy as a table, Megatron-format log lines, a progress bar, and a summary."""

import math
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hetero_megatron.metrics import perplexity
from hetero_megatron.runtime.clock import KINDS
from hetero_megatron.runtime.session import Evaluation, StepResult
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


def strategy_table(strategy: Strategy, colour: Callable[[Stage], str] = lambda stage: "") -> Group:
    """The strategy as the paper's Table 9 prints one: a row per pipeline, a cell per tensor-parallel group.

    Deep pipelines are continued in further tables, which 80 columns have room for. Idle ranks are named below.
    `colour` is a style of rich for each stage, such as one for each kind of device.
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
        _stages_table(strategy, range(first, min(first + abreast, depth)), colour)
        for first in range(0, depth, abreast)
    ]
    idle = [f"idle: {rank_text(strategy.idle_ranks)}"] if strategy.idle_ranks else []
    return Group(*tables, *idle)


def strategy_text(strategy: Strategy) -> str:
    """The table as text."""
    console = Console(width=COLUMNS, file=StringIO())
    with console.capture() as printed:
        console.print(strategy_table(strategy))
    return printed.get()


def _cell(stage: Stage, first: bool, last: bool) -> str:
    return f"{rank_text(stage.ranks)}\n{layer_text(stage, first, last)}\n{parallel_text(stage)}"


def _stages_table(strategy: Strategy, shown: range, colour: Callable[[Stage], str]) -> Table:
    title = "strategy" if not shown.start else f"strategy, from stage {shown.start}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("micro-batches", no_wrap=True)
    for number in shown:
        table.add_column(f"stage {number}", justify="center")
    for pipeline in strategy.pipelines:
        stages = pipeline.stages
        cells = [
            Text(_cell(stage, n == 0, n == len(stages) - 1), colour(stage))
            for n, stage in enumerate(stages)
            if n in shown
        ]
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
    result: StepResult,
    train_iters: int,
    global_batch_size: int,
    skipped: int,
    strategy: str,
    consumed_samples: int | None = None,
    data_wait_seconds: float | None = None,
    rates: Mapping[int, float] | None = None,
) -> str:
    """One line in Megatron's format, with ` strategy | tokens/s | bubble | data wait | compute ` appended.

    `rates`: FLOP/s of each rank while it computed; of several, the slowest is named.

    `global_batch_size` is that of this step; `consumed_samples`, left out, is as many in each step so far.
    """
    if consumed_samples is None:
        consumed_samples = result.iteration * global_batch_size
    seconds = result.seconds["step"]
    parts = [
        f" iteration {result.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {consumed_samples:12d}",
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
    if data_wait_seconds is not None:
        parts.append(f"data wait (ms): {data_wait_seconds * 1e3:.1f}")
    if rates:
        slowest = min(rates, key=lambda rank: rates[rank])
        most = "" if len(rates) == 1 else f" to {max(rates.values()) / 1e12:.4g}, slowest rank {slowest}"
        parts.append(f"compute TFLOP/s: {rates[slowest] / 1e12:.4g}{most}")
    note = f"\n  step {result.iteration} made no update: {result.skipped}" if result.skipped else ""
    return " | ".join(parts) + " |" + note


def validation_line(iteration: int, evaluation: Evaluation) -> str:
    """The result of an evaluation in Megatron's format.

    >>> validation_line(100, Evaluation(2.0, 4096))
    ' validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |'
    """
    loss = evaluation.loss
    parts = [
        f" validation loss at iteration {iteration}",
        f"lm loss value: {loss:.6E}",
        f"lm loss PPL: {perplexity(loss):.6E}",
    ]
    return " | ".join(parts) + " |"


class RunProgress:
    """A progress bar that log lines scroll past; silent on ranks that do not lead, plain where there is no terminal.

    A resumed run begins with `completed` of its `train_iters` steps done.
    """

    def __init__(self, train_iters: int, shown: bool, completed: int = 0) -> None:
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
        self._task = self._bar.add_task("training", total=train_iters, completed=completed, loss="-")

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
    """Figures of a whole run, or of what was run since it was resumed, for its end."""

    def __init__(self, flops_per_token: int) -> None:
        self.flops_per_token = flops_per_token
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.tokens = 0
        self.skipped = 0
        self.data_wait_seconds = 0.0
        self.seconds = dict.fromkeys((*KINDS, "step"), 0.0)
        self.turns: dict[str, list[float]] = {}
        self.switches: list[float] = []
        self._first: int | None = None
        self._last = 0

    def add(self, result: StepResult, data_wait_seconds: float = 0.0, strategy: str = "") -> None:
        """Count one step, how long it waited for its data before it began, and by which of several strategies it was."""
        if strategy:
            self.turns.setdefault(strategy, []).append(result.seconds["step"])
        if result.skipped:
            self.skipped += 1
        else:
            self.losses.append(result.loss)
        self._first, self._last = self._first or result.iteration, result.iteration
        self.tokens += result.valid_tokens
        self.data_wait_seconds += data_wait_seconds
        for kind in self.seconds:
            self.seconds[kind] += result.seconds[kind]

    def switched(self, seconds: float) -> None:
        """Count one change of strategy."""
        self.switches.append(seconds)

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Note what was measured after a step."""
        self.evaluations.append((iteration, evaluation))

    def print(self, folder: Path) -> None:
        """The summary as a table, and where the files are."""
        table = Table(title="run", title_justify="left", show_header=False)
        if self.losses:
            table.add_row("loss, first and last step", f"{self.losses[0]:.4f} -> {self.losses[-1]:.4f}")
        if self.evaluations:
            table.add_row("validation loss", self._validation())
        step = self.seconds["step"] or 1.0
        table.add_row("tokens/s (targets that count)", f"{self.tokens / step:.0f}")
        table.add_row("model FLOP/s, all ranks", f"{self.flops_per_token * self.tokens / step:.3g}")
        shares = {kind: self.seconds[kind] / step for kind in KINDS}
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        table.add_row(
            "time, average rank", "\n".join(f"{100 * s:5.1f}% {kind}" for kind, s in shares.items())
        )
        if self.data_wait_seconds >= 0.05:
            table.add_row("waited for data, this rank", f"{self.data_wait_seconds:.1f} s")
        table.add_row("steps", self._steps())
        if self.turns:
            table.add_row("strategies", self._turns())
        console = Console()
        console.print(table)
        # Outside the table, which would cut a long path.
        console.print(
            f"files: {folder / 'metrics.jsonl'}", soft_wrap=True, highlight=False, markup=False, emoji=False
        )

    def _validation(self) -> str:
        """The last loss, and the best one where that is another."""
        iteration, last = self.evaluations[-1]
        text = f"{last.loss:.4f} (perplexity {perplexity(last.loss):.2f}) after step {iteration}"
        best_iteration, best = min(self.evaluations, key=lambda each: each[1].loss)
        if best.loss < last.loss:
            text += f"\n{best.loss:.4f} at best, after step {best_iteration}"
        return text

    def _turns(self) -> str:
        """How many steps each strategy made, and what the switches took."""
        lines = [
            f"{name}: {len(took)} steps, {sum(took) / len(took):.3f} s each"
            for name, took in self.turns.items()
        ]
        whole = self.seconds["step"] + sum(self.switches)
        share = f", {100 * sum(self.switches) / whole:.1f}% of the time" if self.switches else ""
        return "\n".join([*lines, f"{len(self.switches)} switches in {sum(self.switches):.3f} s{share}"])

    def _steps(self) -> str:
        # A run that began anew says only how many steps it made.
        span = f", {self._first} to {self._last}" if (self._first or 1) > 1 else ""
        skipped = f"\n{self.skipped} without an update" if self.skipped else ""
        return f"{len(self.losses)} in {self.seconds['step']:.1f} s{span}{skipped}"
