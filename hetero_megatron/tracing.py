"""Traces of real steps: what every rank did when, in one file of the form that `simulate --trace` writes."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from hetero_megatron.cluster import ranges_text
from hetero_megatron.errors import RecipeError
from hetero_megatron.recipe_sections import LoggingSection
from hetero_megatron.runtime.recorder import Recorder
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import Say
from hetero_megatron.trace_file import TraceSpan, chrome_trace, rank_title


def check_trace(section: LoggingSection, done: int, train_iters: int) -> None:
    """Refuse a trace that cannot be written, or of steps that this command does not make.

    Raises:
        RecipeError: naming the key.
    """
    if section.trace is None:
        return
    path, left = Path(section.trace), train_iters - done
    if 0 < left < min(section.trace_steps):
        raise RecipeError(
            f"logging.trace_steps: {ranges_text(section.trace_steps)} count from the first step that this command makes, "
            f"and it makes {left}; name earlier ones"
        )
    try:
        path.open("a").close()
    except OSError as error:
        raise RecipeError(f"logging.trace: {path} cannot be written: {error.strerror}") from error


class Tracer:
    """Records the wanted steps of one rank and writes those of all ranks.

    After each traced step all ranks tell all, and the first of them writes the file anew: when a rank is lost later, the
    steps before are there, whoever writes then. Ranks of several machines are as far apart as the machines' clocks.
    """

    def __init__(self, path: Path, wanted: Sequence[int], say: Say) -> None:
        """`wanted`: iterations, ascending; `say` is told that the file is there, or why not."""
        self._path, self._wanted = path, wanted
        self._say = say
        self._spans: list[TraceSpan] = []
        self._names: dict[int, str] = {}

    @staticmethod
    def of(section: LoggingSection, done: int, train_iters: int, say: Say) -> "Tracer | None":
        """For a command that goes on after `done` iterations; None where no trace is asked for, or of nothing it makes."""
        wanted = sorted(done + step for step in section.trace_steps if done + step <= train_iters)
        return Tracer(Path(section.trace), wanted, say) if section.trace is not None and wanted else None

    def take_over(self, before: "Tracer") -> None:
        """Go on where another one ended, of the same run before it lost ranks."""
        self._spans, self._names = before._spans, before._names

    def begin(self, session: Session) -> None:
        """A step begins, which is recorded if it is to be traced."""
        if session.iteration + 1 in self._wanted:
            session.clock.recorder = Recorder(session.world.rank, session.world.device)

    def end(self, session: Session) -> None:
        """The step is done. Collective over the session's ranks if it is traced."""
        if session.clock.recorder is None or session.iteration not in self._wanted:
            return
        recorder, session.clock.recorder = session.clock.recorder, None
        world, program = session.world, session.program
        own = recorder.spans(session.iteration)
        told: list[list[TraceSpan]] = [own] * len(world.ranks)
        if len(world.ranks) > 1:
            dist.all_gather_object(told, own, group=world.control)
        self._spans += [span for spans in told for span in spans]
        for rank in world.ranks:
            pipeline, _ = program.pipeline_of(rank)
            kind = program.cluster.kind(rank).name
            self._names[rank] = rank_title(rank, kind, pipeline, program.stage_of(rank))
        if world.leads:
            self._write(is_last=session.iteration >= self._wanted[-1])

    def _write(self, is_last: bool) -> None:
        began = min(span.start for span in self._spans)
        text = chrome_trace([span.since(began) for span in self._spans], self._names)
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            self._say(f"WARNING: logging.trace: {self._path} cannot be written: {error.strerror}")
            return
        if is_last:
            self._say(f"traced: {self._path}, which ui.perfetto.dev opens, and `simulate --beside` compares")


def continued(before: Tracer | None, now: Tracer | None) -> Tracer | None:
    """`now`, with all that `before` has recorded of the same run."""
    if before is not None and now is not None:
        now.take_over(before)
    return now
