"""Which checkpoint a run goes on from, and whether it is whole on every rank (`checkpoint.resume` of a recipe)."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_files import (
    POINTER,
    Marker,
    checksum,
    finished,
    iteration_of,
    numbers,
    read_pointer,
    refuse_foreign_checkpoints,
    unfinished,
)
from hetero_megatron.runtime.world import Say, World

Resume = Literal["auto", "never"] | int
_T = TypeVar("_T")


def choose(
    folder: Path,
    resume: Resume = "auto",
    say: Say = print,
    damaged: Collection[Path] = (),
    otherwise: str = "starting at iteration 0",
) -> Path | None:
    """The checkpoint in `folder` to go on from; None to start anew. Pure but for reading names, markers and sizes.

    `otherwise` is said to happen when there is none.

    `auto` takes the newest complete one, passing over `damaged` and shortened ones, and says so; a number takes that
    iteration or nothing; `never` starts anew, in a folder without checkpoints only.

    Raises:
        CheckpointError: the iteration asked for is not there or damaged; `auto` finds damaged ones only; `never`
            finds checkpoints; there are checkpoints of another program.
    """
    refuse_foreign_checkpoints(folder)
    there = finished(folder)
    if resume == "never":
        if there:
            raise CheckpointError(
                f"resume is never, and {folder} has checkpoints of iterations {numbers(there)}; "
                "choose another output folder, or resume: auto"
            )
        return None
    if resume != "auto":
        return _asked_for(folder, resume, there)
    for path in unfinished(folder):
        say(
            f"{path} is the rest of a save that was never finished; it is not used, and the next save removes it"
        )
    faults: list[str] = []
    for path in reversed(there.values()):
        fault = f"{path} is damaged" if path in damaged else _fault(path)
        if not fault:
            _compare_pointer(folder, path, say)
            if faults:
                say(f"going on from the checkpoint before: {path}")
            return path
        say(f"WARNING: {fault}; it is passed over")
        faults.append(fault)
    if faults:
        raise CheckpointError(
            f"{folder}: no checkpoint is whole: {'; '.join(faults)}; restore one, or start in another output folder"
        )
    _compare_pointer(folder, None, say)
    say(f"no checkpoint in {folder}: {otherwise}")
    return None


def _asked_for(folder: Path, iteration: int, there: dict[int, Path]) -> Path:
    if iteration not in there:
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint of iteration {iteration}: there is no folder {folder}")
        half = [path for path in unfinished(folder) if iteration_of(path) == iteration]
        why = f" ({half[0].name} is the rest of a save that was never finished)" if half else ""
        raise CheckpointError(
            f"{folder} has no checkpoint of iteration {iteration}{why}; it has iterations {numbers(there)}"
        )
    verify(there[iteration])
    return there[iteration]


def _compare_pointer(folder: Path, path: Path | None, say: Say) -> None:
    """Say when the pointer file does not name what is used."""
    text = read_pointer(folder)
    if text is None or (path is not None and text == str(iteration_of(path))):
        return
    used = f"the newest whole checkpoint, {path.name}, is used" if path else "and there is no checkpoint"
    say(f"{folder / POINTER} says {text!r}; {used}")


def _fault(path: Path) -> str:
    """What is wrong with the files of a checkpoint, "" when their sizes are right."""
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def verify(path: Path, checksums: bool = False, share: tuple[int, int] = (0, 1)) -> Marker:
    """Compare the files of a checkpoint with its marker: sizes of all, checksums of every n-th from the i-th on.

    `share` is (i, n), so that n ranks read each file once.

    Raises:
        CheckpointError: naming every file that is missing, empty, shorter, longer or changed.
    """
    marker, faults = Marker.read(path), []
    named = iteration_of(path)
    if named is not None and named != marker.iteration:
        faults.append(f"the folder says iteration {named}, its marker {marker.iteration}")
    for place, (name, facts) in enumerate(sorted(marker.files.items())):
        file = path / name
        try:
            size = file.stat().st_size
            if size != facts.bytes:
                faults.append(f"{name} has {size} bytes instead of {facts.bytes}")
            elif checksums and place % share[1] == share[0] and checksum(file) != facts:
                faults.append(f"{name} has changed since it was written: its CRC-32 is not {facts.crc32:08x}")
        except FileNotFoundError:
            faults.append(f"{name} is missing")
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
    if faults:
        raise CheckpointError(f"{path} is damaged: {'; '.join(faults)}")
    return marker


def agree_on_checkpoint(world: World, path: Path | None) -> None:
    """Collective: every rank sees the same whole checkpoint; each file is read and checked by one rank.

    Raises:
        CheckpointError: the same on every rank; naming the ranks that see another one or none, or the damaged files.
    """
    damage, difference = _compare(world, path)
    if damage or difference:
        raise CheckpointError(damage or difference)


def _compare(world: World, path: Path | None) -> tuple[str, str]:
    """What is damaged, and how the ranks differ in what they see; "" where nothing is wrong, the same on every rank."""
    digest, fault = None, ""
    if path is not None:
        try:
            share = (world.ranks.index(world.rank), len(world.ranks))
            digest = verify(path, checksums=True, share=share).digest
        except CheckpointError as error:
            fault = str(error)
    found = _gather(world, (None if path is None else str(path), digest, fault))
    faults = {rank: text for rank, (_, _, text) in found.items() if text}
    if faults:
        return f"rank {numbers(faults)}: {'; '.join(dict.fromkeys(faults.values()))}", ""
    first, first_digest, _ = found[world.ranks[0]]
    for rank, (theirs, digest, _) in found.items():
        if (theirs is None) != (first is None) or digest != first_digest:
            other = "another one of that name" if theirs == first else theirs or "no checkpoint"
            return "", (
                f"rank {world.ranks[0]} goes on from {first or 'no checkpoint'}, and rank {rank} from {other}; "
                "all ranks have to see the same folder, on a file system that they share"
            )
    return "", ""


def _gather(world: World, mine: _T) -> dict[int, _T]:
    """What every rank has, by rank."""
    found = [mine] * len(world.ranks)
    if len(world.ranks) > 1:
        dist.all_gather_object(found, mine, group=world.control)
    return dict(zip(world.ranks, found, strict=True))


def choose_together(world: World, folder: Path, resume: Resume = "auto", say: Say = print) -> Path | None:
    """Collective `choose` with checksums: what every rank goes on from, the same on all.

    Under `auto` a damaged checkpoint is passed over by all ranks, which is said. `say` is called on the first rank.

    Raises:
        CheckpointError: as `choose` and `agree_on_checkpoint`; the same on every rank.
    """
    say = world.once(say)
    damaged: set[Path] = set()
    while True:
        path, refusal = None, ""
        try:
            path = choose(folder, resume, say, damaged)
        except CheckpointError as error:
            refusal = str(error)
        refusals = _gather(world, refusal)
        for rank, text in refusals.items():
            if text:
                raise CheckpointError(text if all(refusals.values()) else f"rank {rank}: {text}")
        damage, difference = _compare(world, path)
        if difference or (damage and resume != "auto"):
            raise CheckpointError(damage or difference)
        if not damage or path is None:
            return path
        say(f"WARNING: {damage}")
        damaged.add(path)
