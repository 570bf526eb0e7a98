"""A disk that is full for one rank, or for all (O-58)."""

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.checkpoint_choice import choose, verify
from hetero_megatron.runtime.checkpoint_files import read_pointer
from hetero_megatron.runtime.checkpoint_read import SavedState
from tests.distributed.saving import Run, run

ENOUGH, TOO_LITTLE = 64 << 20, 100 << 10


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_size_limit_of_one_rank_fails_the_save_on_all_ranks(
    tmp_path: Path, asynchronous: bool
) -> None:
    def work(each: Run) -> Any:
        each.step()
        each.save()
        first = each.saver.finish()
        each.step()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        # Both replicas hold everything; the first one writes it.
        if each.world.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_LITTLE, hard))
        second = each.save() or each.saver.finish()
        there = names(tmp_path), read_pointer(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        each.step()
        return first, second, there, each.save() or each.saver.finish()

    found = run(work, lambda s: Saver(tmp_path, s, asynchronous=asynchronous, say=lambda text: None))
    assert found[0] == found[1]
    _, second, there, third = found[0]
    assert isinstance(second, Failed)
    assert (
        f"rank 0: no space to write {tmp_path}/iter_0000002/__0_0.distcp: File too large after "
        in second.text
    )
    assert "position" not in second.text
    assert there == (["iter_0000001", "latest_checkpointed_iteration.txt"], "1")
    assert third == Saved(3, tmp_path / "iter_0000003")
    assert names(tmp_path) == ["iter_0000001", "iter_0000003", "latest_checkpointed_iteration.txt"]
    for path in tmp_path.glob("iter_*"):
        verify(path, checksums=True)
        assert not list(path.glob("*.tmp"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds one checkpoint of T0 and half of a second one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_and_its_pointer(small_disk: Path, tmp_path: Path) -> None:
    def work(each: Run) -> Any:
        each.step()
        first = each.save() or each.saver.finish()
        each.step()
        return first, each.save() or each.saver.finish()

    found = run(work, lambda s: Saver(small_disk, s, say=lambda text: None))
    assert found[0] == found[1]
    first, second = found[0]
    assert first == Saved(1, small_disk / "iter_0000001")
    assert isinstance(second, Failed)
    assert f"no space to write {small_disk}/iter_0000002/" in second.text
    assert "No space left on device" in second.text
    assert names(small_disk) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert read_pointer(small_disk) == "1"
    path = choose(small_disk, "auto", lambda text: None)
    assert path is not None
    saved = SavedState.open(path)

    def go_on(each: Run) -> Any:
        each.step()
        return each.losses

    assert list(run(go_on, lambda s: Saver(tmp_path / "elsewhere", s), saved)[0]) == [2]
