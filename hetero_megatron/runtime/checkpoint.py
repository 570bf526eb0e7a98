"""Saving while training goes on: a snapshot, files written by a thread, and an agreement that rides on the steps.

A save has two stages. Every rank writes its own tensors; when all have, the lowest rank writes the contents and the
marker, moves the pointer and removes what is too old. A rank's progress is two votes in `Session.step`, whose sums
every rank has, so all see a stage end at the same step and nobody waits or asks. Threads send nothing.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_files import (
    finish,
    finished,
    folder_of,
    remove,
    set_aside,
    tidy,
    unfinished,
)
from hetero_megatron.runtime.checkpoint_header import Header
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS, Part, parts_of, shapes_of
from hetero_megatron.runtime.checkpoint_snapshot import Snapshot, Tensors, live
from hetero_megatron.runtime.checkpoint_write import (
    Cancelled,
    Written,
    could_not_write,
    write_contents,
    write_parts,
)
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import Say


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete; the same on every rank."""

    iteration: int
    path: Path


@dataclass(frozen=True, slots=True)
class Failed:
    """A checkpoint was given up and its files are removed; the ones before it, and the pointer, are as they were.

    `text` names the ranks, files and reasons; the same on every rank.
    """

    iteration: int
    path: Path
    text: str


@dataclass
class _Pending:
    """The save that is under way."""

    header: Header
    path: Path
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    completing: bool = False
    error: str = ""
    written: Written = field(default_factory=lambda: Written({}, ()))
    everyone: Sequence[Written] = ()
    notices: list[str] = field(default_factory=list)


class Saver:
    """Writes checkpoints of one session into a run's folder.

    Attributes:
        session: whose state and counters are saved; another one that shares its optimizer states may take its place.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        keep_last: int = 3,
        asynchronous: bool = True,
        stop_on_failure: bool = False,
        say: Say = print,
        forsaken: bool = False,
    ) -> None:
        """Collective, after the session was restored, if it was.

        Finished checkpoints of later iterations than the session's, which its run has left by going on from an
        earlier one, are renamed to `iter_....aside`, so that the newest one is always of this run. With `forsaken`,
        saves that were begun and not ended are removed: ranks that had a part in them are gone, and no rank that is
        left writes. `say` is called on the first rank.

        Raises:
            CheckpointError: the folder cannot be made or written; `keep_last` is below 1; the same on every rank.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; at least the newest checkpoint is kept")
        self._folder, self.session, self._world = folder, session, session.world
        self._keep_last, self._asynchronous, self._stop = keep_last, asynchronous, stop_on_failure
        self._patience = min(30.0, self._world.timeout.total_seconds() / 4)
        self._leads, self._say = self._world.leads, self._world.once(say)
        adam = session.settings.name == "adam"
        self._kinds = (MASTER, *MOMENTS) if adam else (MASTER,)
        self._parts = parts_of(session.program, self._world.rank, self._kinds)
        self._all_parts: tuple[Part, ...] | None = None
        self._snapshot = Snapshot(session.state, self._kinds)
        self._pending: _Pending | None = None
        # Told of an iteration when some of its tensors are written, and some are not; by the thread that writes.
        self.amid: Callable[[int], None] | None = None
        self._saved = self._open_folder(forsaken)

    def _open_folder(self, forsaken: bool) -> set[int]:
        """Set later checkpoints aside; the iterations that need no saving."""
        found: list[Any] = [None, ""]
        if self._leads:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for path in set_aside(self._folder, self.session.iteration):
                    self._say(
                        f"{path.name.split('.')[0]} is later than iteration {self.session.iteration}, from which this "
                        f"run goes on; it is kept as {path.name}"
                    )
                for path in unfinished(self._folder) if forsaken else ():
                    remove(path)
                    self._say(f"{path.name} was not saved: ranks were lost meanwhile; its files are removed")
                found[0] = set(finished(self._folder))
            except OSError as error:
                found[1] = str(could_not_write(self._folder, error))
        if len(self._world.ranks) > 1:
            dist.broadcast_object_list(found, group=self._world.control, group_src=0)
        if found[1]:
            raise CheckpointError(found[1])
        return set(found[0])

    @property
    def is_pending(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self._pending is not None

    def start(self, iteration: int, payload: Mapping[str, Any]) -> Saved | Failed | None:
        """Collective between two steps: begin to save what the session holds now, or save it, when not asynchronous.

        A save that is under way is waited for first. An iteration that is saved already, such as the one that was
        resumed from, is not saved again.

        Returns:
            How a save ended, when one did in this call: the one before, or this one when it is not asynchronous.

        Raises:
            CheckpointError: the payload is no JSON; or a save failed and `stop_on_failure` is on.
        """
        header = self._header(iteration, payload)
        header.to_json()
        before = self.finish()
        path = folder_of(self._folder, iteration)
        if iteration in self._saved:
            return before or Saved(iteration, path)
        self._pending = pending = _Pending(header, path)
        tensors: Tensors = {}
        try:
            state = self.session.state
            tensors = self._snapshot.take() if self._asynchronous else live(state, self._kinds)
        except (RuntimeError, MemoryError) as error:
            pending.error = f"no snapshot of {self._snapshot.bytes} bytes: {error}"
        if not pending.error:
            self._run(pending, lambda: self._write(pending, tensors))
        return before if self._asynchronous else self.finish()

    def _header(self, iteration: int, payload: Mapping[str, Any]) -> Header:
        session = self.session
        shapes = shapes_of(session.program)
        skipped = session.skipped_iterations
        return Header(iteration, session.state.step, skipped, self._kinds, shapes, payload)

    def _run(self, pending: _Pending, work: Callable[[], None]) -> None:
        """`work` in a thread; whatever it raises is the save's error."""

        def guarded() -> None:
            try:
                work()
            except Cancelled:
                pass
            except CheckpointError as error:
                pending.error = str(error)
            except OSError as error:
                pending.error = str(could_not_write(pending.path, error))
            except Exception as error:  # a defect must reach the other ranks, too
                pending.error = f"{type(error).__name__}: {error}"

        pending.thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        pending.thread.start()

    def _write(self, pending: _Pending, tensors: Tensors) -> None:
        self._snapshot.wait()
        number = self._world.ranks.index(self._world.rank)
        iteration = pending.header.iteration
        amid = None if self.amid is None else partial(self.amid, iteration)
        pending.written = write_parts(pending.path, number, self._parts, tensors, pending.cancelled, amid)

    def votes(self) -> tuple[float, float]:
        """For `Session.step(votes=...)`: whether this rank's work for the stage is done, and whether it failed."""
        pending = self._pending
        if pending is None or self._is_working():
            return 0.0, 0.0
        return (0.0, 1.0) if pending.error else (1.0, 0.0)

    def settle(self, summed_votes: Sequence[float]) -> Saved | Failed | None:
        """Collective after each step, with the sums of all ranks' `votes`: what has become of a save, once it is known.

        Raises:
            CheckpointError: the save failed and `stop_on_failure` is on; the same on every rank.
        """
        pending = self._pending
        if pending is None:
            return None
        done, failed = summed_votes
        if failed:
            return self._give_up(pending)
        if round(done) < len(self._world.ranks):
            return None
        if not pending.completing:
            self._complete(pending)
            return None
        self._pending = None
        iteration = pending.header.iteration
        self._saved.add(iteration)
        self._say(f"saved iteration {iteration} in {pending.path}")
        for text in pending.notices:
            self._say(f"WARNING: {text}")
        return Saved(iteration, pending.path)

    def _complete(self, pending: _Pending) -> None:
        """All tensors are written: tell the first rank what lies where, and let it finish the checkpoint."""
        pending.completing, pending.thread = True, None
        everyone: list[Any] = [pending.written]
        world = self._world
        if len(world.ranks) > 1:
            everyone = [None] * len(world.ranks)
            receivers = everyone if self._leads else None
            dist.gather_object(pending.written, receivers, group=world.control, group_dst=0)
        if self._leads:
            pending.everyone = everyone
            self._run(pending, lambda: self._write_contents(pending))

    def _write_contents(self, pending: _Pending) -> None:
        if self._all_parts is None:
            program, ranks = self.session.program, self._world.ranks
            self._all_parts = tuple(part for rank in ranks for part in parts_of(program, rank, self._kinds))
        marker = write_contents(pending.path, pending.header, self._all_parts, pending.everyone)
        finish(self._folder, marker)
        try:
            pending.notices += tidy(self._folder, marker.iteration, self._keep_last)
        except Exception as error:  # what is complete must not be given up for what is left over
            pending.notices.append(f"old checkpoints were not removed: {error}")

    def _give_up(self, pending: _Pending) -> Failed:
        """Collective: learn what failed where, then remove what was written."""
        pending.cancelled.set()
        while self._all_sum((float(self._is_working(self._patience)),))[0]:
            pass  # a rank is still at its last tensor
        world = self._world
        errors = [pending.error] * len(world.ranks)
        if len(world.ranks) > 1:
            dist.all_gather_object(errors, pending.error, group=world.control)
        if self._leads:
            try:
                remove(pending.path)
            except OSError as error:
                self._say(f"WARNING: {pending.path} could not be removed: {error}")
        if len(world.ranks) > 1:
            # Nobody may write into the folder again while it is being removed.
            dist.barrier(group=world.control)
        self._pending = None
        who = "; ".join(
            f"rank {rank}: {text}" for rank, text in zip(world.ranks, errors, strict=True) if text
        )
        text = f"iteration {pending.header.iteration} was not saved: {who}"
        if self._stop:
            raise CheckpointError(text)
        self._say(f"WARNING: {text}; the checkpoints before it are as they were, and training goes on")
        return Failed(pending.header.iteration, pending.path, text)

    def finish(self) -> Saved | Failed | None:
        """Collective: wait for the save that is under way, if any, and return how it ended.

        Ranks meet again and again meanwhile: files may take longer than the time-out of a message.

        Raises:
            CheckpointError: as `settle`.
        """
        outcome: Saved | Failed | None = None
        while self._pending is not None:
            self._is_working(self._patience)
            outcome = self.settle(self._all_sum(self.votes()))
        return outcome

    def abandon(self) -> None:
        """Stop what is under way on this rank alone, because others are gone; what is half written is no checkpoint."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancelled.set()
            if pending.thread is not None:
                pending.thread.join(self._patience)

    def _is_working(self, patience: float = 0.0) -> bool:
        """Whether this rank's thread still runs after at most `patience` seconds."""
        thread = self._pending.thread if self._pending else None
        if thread is None:
            return False
        thread.join(patience)
        return thread.is_alive()

    def _all_sum(self, values: Sequence[float]) -> list[float]:
        """Collective: what the ranks have, added up."""
        total = torch.tensor(values, dtype=torch.float64)
        if len(self._world.ranks) > 1:
            dist.all_reduce(total, group=self._world.control)
        found: list[float] = total.tolist()
        return found
