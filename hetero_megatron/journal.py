"""What a run leaves behind of its steps: log lines, metrics, and a summary at its end; by the lowest rank only."""

import contextlib
import time
from collections.abc import Iterator

from hetero_megatron.data.loader import LoadedStep
from hetero_megatron.metrics import Metrics, StepFacts, Turn, peak_memory_bytes, run_facts
from hetero_megatron.models.config import flops_per_token
from hetero_megatron.pace import Pace
from hetero_megatron.report import RunProgress, RunSummary, log_line, short_strategy, validation_line
from hetero_megatron.run import Run
from hetero_megatron.runtime.session import Evaluation, Session, StepResult
from hetero_megatron.runtime.switch import SwitchReport


class Journal:
    """The journal of one rank; those that do not lead write nothing.

    Attributes:
        session: the one that trains.
    """

    def __init__(self, run: Run, session: Session, progress: RunProgress, metrics: Metrics | None) -> None:
        self._run, self.session, self._progress, self._metrics = run, session, progress, metrics
        self._summary = RunSummary(_flops_per_token(run))
        self._names, self._strategies = list(run.programs), strategy_texts(run)
        self._switch_seconds = 0.0
        self._in_trouble = False
        self.pace: Pace | None = None

    @staticmethod
    @contextlib.contextmanager
    def kept(run: Run, session: Session) -> Iterator["Journal"]:
        """The journal of a run, open until it ends."""
        leads = session.world.leads
        logging = run.recipe.logging
        with contextlib.ExitStack() as stack:
            metrics = None
            if leads:
                facts = run_facts(
                    run.recipe.model_dump(mode="json"),
                    "; ".join(strategy_texts(run)),
                    run.kernels.names,
                )
                made = Metrics(
                    run.folder,
                    facts,
                    resumed_at=run.start.iteration,
                    flops_per_token=_flops_per_token(run),
                    devices=len(session.world.ranks),
                    tensorboard=logging.tensorboard,
                    wandb=logging.wandb,
                )
                metrics = stack.enter_context(made)
            done = run.start.iteration
            progress = stack.enter_context(RunProgress(run.settings.train_iters, leads, done))
            yield Journal(run, session, progress, metrics)

    def say(self, text: str) -> None:
        """One line for people."""
        self._progress.log(text)

    def switched(self, before: str, after: str, report: SwitchReport) -> None:
        """Another strategy trains from now on, or measures."""
        self._switch_seconds += report.seconds["total"]
        self._summary.switched(report.seconds["total"])
        self.say(f"  strategy {before} -> {after}: {report}")

    def step(
        self,
        result: StepResult,
        loaded: LoadedStep,
        measured: Evaluation | None,
        note: str | None,
        consumed_tokens: int,
    ) -> None:
        """A step is done, and what was measured after it."""
        every = self._run.recipe.training.log_interval
        several = len(self._names) > 1
        number = loaded.strategy
        self._summary.add(result, loaded.wait_seconds, self._names[number] if several else "")
        self._progress.advance(result)
        padding = loaded.padding / max(1, loaded.tokens + loaded.padding)
        if loaded.report is not None:
            padding = loaded.report.padding_share
        rates = _measured(self.pace)
        facts = StepFacts(
            loaded.samples.first,
            loaded.position.sample,
            consumed_tokens,
            padding,
            loaded.wait_seconds,
            measured,
            peak_memory_bytes(self.session.world.device),
            note,
            loaded.lengths,
            Turn(number, self._names[number], self._switch_seconds) if several else None,
            rates,
            time.time(),
        )
        self._switch_seconds = 0.0
        if self._metrics is not None:
            self._metrics.step(result, facts)
            self._tell_trouble(self._metrics.trouble)
        if result.skipped or result.iteration == 1 or result.iteration % every == 0:
            self.say(
                log_line(
                    result,
                    self._run.settings.train_iters,
                    loaded.samples.count,
                    self.session.skipped_iterations,
                    self._strategies[number],
                    loaded.position.sample,
                    loaded.wait_seconds,
                    rates,
                )
            )
        if note:
            self.say(f"  {note}")
        if measured is not None:
            self._summary.evaluated(result.iteration, measured)
            self.say(validation_line(result.iteration, measured))

    def _tell_trouble(self, trouble: str) -> None:
        """Once when it begins, not at every step."""
        if trouble and not self._in_trouble:
            self.say(f"WARNING: {trouble}; training goes on, and they are written as soon as they can be")
        self._in_trouble = bool(trouble)

    def end(self, asked: str) -> None:
        """The run is over: complete, or after the step in which someone was asked to stop."""
        if self._metrics is None:
            return
        iteration, last = self.session.iteration, self._run.settings.train_iters
        if iteration == self._run.start.iteration and not asked:
            key = "train_iters" if self._run.recipe.training.train_iters else "train_epochs"
            self.say(
                f"nothing to train: {iteration} iterations are made, and the run has {last}; raise training.{key}, or choose "
                "another output folder to start anew"
            )
            return
        if asked:
            self.say(
                f"stopped by {asked} after iteration {iteration} of {last}; everything is saved in {self._run.folder}, "
                "and the same command goes on from there"
            )
        if self._metrics.trouble:
            self.say(f"WARNING: {self._metrics.trouble}; the last steps are missing there")
        self._summary.print(self._run.folder)


def strategy_texts(run: Run) -> list[str]:
    """The strategies of a run by number, each in a word; with their names where there are several."""
    several = len(run.programs) > 1
    return [
        f"{name} {short_strategy(program.strategy)}" if several else short_strategy(program.strategy)
        for name, program in run.programs.items()
    ]


def _measured(pace: Pace | None) -> dict[int, float]:
    """FLOP/s of the ranks that have told theirs."""
    rates = {} if pace is None else pace.rates
    return {rank: rate.compute for rank, rate in rates.items() if rate.compute}


def _flops_per_token(run: Run) -> int:
    return flops_per_token(run.config, run.recipe.training.seq_length)
