"""A corpus of text becomes a .bin/.idx pair: by several processes, in the order of the source, resumable.

Parts are kept in `PREFIX.parts` until all are done; what is written does not depend on the number of processes, nor on
how often the work was stopped. The pair gets its name at the end, and its `.json` last of all.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.forked import Report, run_forked
from hetero_megatron.data.indexed import id_dtype, pair
from hetero_megatron.data.joining import join_parts
from hetero_megatron.data.part import Part, PartFiles, make_part, unwritable
from hetero_megatron.data.prepared import Sidecar, beside
from hetero_megatron.data.records import Policy, Reader, Shard, told_of
from hetero_megatron.data.tokenizer import Tokenizer
from hetero_megatron.errors import DataError

# Sizes of parts: small ones give every process work, large ones are fewer files. A corpus is cut into about so many.
_SMALLEST, _LARGEST, _PARTS = 2**20, 2**25, 256
# Part of every fingerprint: raised when the same text would become other tokens or another file.
_REVISION = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is, in bytes of its source; and what it has found."""

    done: int
    total: int
    documents: int
    tokens: int


def no_progress(progress: Progress) -> None:
    """Tell nobody."""


def fingerprint(reader: Reader, tokenizer: Tokenizer, policy: Policy) -> str:
    """Equal for sources, tokenizers and policies that give equal files: by path, size and time of change."""
    files = [(os.path.abspath(path), *_stamp(path)) for path in reader.paths]
    value = [_REVISION, reader.identity, files, tokenizer.fingerprint, policy]
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def prepare(
    reader: Reader,
    tokenizer: Tokenizer,
    prefix: str | Path,
    policy: Policy = "stop",
    *,
    workers: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = no_progress,
    shard_bytes: int | None = None,
) -> Sidecar:
    """Write the pair `prefix`, unless it is there already; go on where an earlier attempt was stopped.

    A second process that wants the same pair waits for the first. Free space is needed for the tokens twice.

    Raises:
        DataError: a record is refused, there is no document, the source changes meanwhile, something else stands at
            `prefix`, or files cannot be written.
    """
    mark = fingerprint(reader, tokenizer, policy)
    parts = beside(prefix, ".parts")
    if (found := _present(prefix, mark, overwrite)) is not None:
        return found
    try:
        parts.mkdir(parents=True, exist_ok=True)
        with _locked(parts, say):
            if (found := _present(prefix, mark, overwrite)) is not None:
                shutil.rmtree(parts, ignore_errors=True)
                return found
            size = shard_bytes or _part_size(reader)
            _same_plan(parts, f"{mark} {size}")
            work = _Work(reader, tokenizer, policy, parts, reader.shards(size))
            made = work.make(workers or _cores(), say, progress)
            if fingerprint(reader, tokenizer, policy) != mark:
                raise DataError(
                    f"{told_of(reader)} changed while it was turned into tokens; run the same command again"
                )
            sidecar = join_parts(
                reader, tokenizer, work.shards, [*zip(work.files, made, strict=True)], prefix, mark
            )
            # Others may be waiting in the folder: whoever comes last leaves none behind.
            shutil.rmtree(parts, ignore_errors=True)
            return sidecar
    except OSError as error:
        raise unwritable(Path(error.filename or parts), error) from error


@dataclass(frozen=True, slots=True)
class _Work:
    """What has to be done, shard by shard."""

    reader: Reader
    tokenizer: Tokenizer
    policy: Policy
    folder: Path
    shards: tuple[Shard, ...]

    @property
    def files(self) -> list[PartFiles]:
        return [PartFiles(self.folder, number) for number in range(len(self.shards))]

    def make(
        self, workers: int, say: Callable[[str], None], progress: Callable[[Progress], None]
    ) -> list[Part]:
        """All parts, those kept from an earlier attempt included."""
        itemsize = id_dtype(self.tokenizer.vocab_size).itemsize
        kept = [files.read(itemsize) for files in self.files]
        made = {number: part for number, part in enumerate(kept) if part is not None}
        missing = [number for number, part in enumerate(kept) if part is None]
        if made:
            say(f"{told_of(self.reader)}: {len(made)} of {len(kept)} parts are there from an earlier attempt")
        total = sum(shard.size for shard in self.shards)
        # Bytes, documents, tokens: of parts that are done, and of those under way by what they reported.
        so_far = np.array(
            [[self.shards[n].size, part.counts.documents, part.counts.tokens] for n, part in made.items()]
            or [[0, 0, 0]]
        ).sum(axis=0)
        running: dict[int, NDArray[np.int64]] = {}
        for number, ended, value in run_forked(missing, self._one, workers):
            reported = running.pop(number, np.zeros(3, np.int64))
            if ended:
                made[number] = value
                now = np.array([self.shards[number].size, value.counts.documents, value.counts.tokens])
            else:
                now = reported + np.array([value[2], value[0], value[1]])
                now[0] = min(now[0], self.shards[number].size)
                running[number] = now
            so_far = so_far + now - reported
            progress(Progress(int(so_far[0]), total, int(so_far[1]), int(so_far[2])))
        return [made[number] for number in range(len(self.shards))]

    def _one(self, number: int, report: Report) -> Part:
        return make_part(
            self.reader,
            self.shards[number],
            self.tokenizer,
            self.policy,
            PartFiles(self.folder, number),
            lambda *done: report(done),
        )


def _present(prefix: str | Path, mark: str, overwrite: bool) -> Sidecar | None:
    """What stands at the prefix, if it is what is wanted.

    Raises:
        DataError: it is something else, and must not be replaced.
    """
    found = Sidecar.of(prefix)
    there = [path for path in pair(prefix) if path.exists()]
    if found is not None and found.fingerprint == mark and len(there) == 2:
        return found
    # Without a .json, parts beside it say that a preparation was stopped while it gave the files their names.
    unfinished = found is None and (beside(prefix, ".parts") / "plan").is_file()
    if there and not overwrite and not unfinished:
        what = "was made from another source or with another tokenizer" if found else "is not ours"
        raise DataError(f"{there[0]} exists and {what}; choose another output, or overwrite it")
    return None


def _same_plan(parts: Path, plan: str) -> None:
    """Throw away parts of another plan."""
    path = parts / "plan"
    if path.is_file() and path.read_text(encoding="utf-8") == plan:
        return
    for old in parts.iterdir():
        if old.name != "lock":
            old.unlink()
    path.write_text(plan, encoding="utf-8")


@contextmanager
def _locked(parts: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Alone in the folder of parts, which the one before may have removed meanwhile."""
    while True:
        parts.mkdir(parents=True, exist_ok=True)
        try:
            lock = (parts / "lock").open("w")
        except FileNotFoundError:  # removed since
            continue
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that prepares {parts.with_suffix('')}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _same_file(file.fileno(), parts / "lock"):
                yield
                return


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _part_size(reader: Reader) -> int:
    total = sum(shard.size for shard in reader.shards(_LARGEST))
    return max(_SMALLEST, min(_LARGEST, total // _PARTS))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns
