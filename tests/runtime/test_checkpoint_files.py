"""The folder of a run's checkpoints, in one process (runtime/checkpoint_files.py, checkpoint_write.py)."""

import json
from pathlib import Path

import pytest
import torch

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime import checkpoint_files, checkpoint_write
from hetero_megatron.runtime.checkpoint_files import (
    Marker,
    checkpoints,
    finished,
    read_pointer,
    remove,
    set_aside,
    tidy,
    unfinished,
    write_durably,
)
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.checkpoint_write import write_whole
from tests.runtime.saved import checkpoint, tensors


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_checkpoint_has_a_marker_with_all_other_files_and_a_pointer_beside_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 10)
    assert names(tmp_path) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert names(path) == [".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json", "state.json"]
    marker = Marker.read(path)
    assert marker.iteration == 10
    assert {name: facts.bytes for name, facts in marker.files.items()} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != "complete.json"
    }
    assert read_pointer(tmp_path) == "10"


def test_weights_written_by_one_process_are_read_back_in_any_box(tmp_path: Path) -> None:
    saved = SavedState.open(checkpoint(tmp_path, 3))
    whole = dict(tensors(3))
    assert saved.names == ("first.weight", "second.weight")
    assert (saved.iteration, saved.payload) == (3, {"sample": 24})
    assert torch.equal(saved.read("second.weight"), whole["second.weight"])
    assert torch.equal(saved.read("first.weight", bounds=((3, 9), (2, 8))), whole["first.weight"][3:9, 2:])


def test_weights_are_stored_in_fp32(tmp_path: Path) -> None:
    path = write_whole(tmp_path, 0, {}, [("w.weight", torch.full((2, 3), 0.1, dtype=torch.bfloat16))])
    read = SavedState.open(path).read("w.weight")
    assert read.dtype is torch.float32
    assert torch.equal(read, torch.full((2, 3), 0.1, dtype=torch.bfloat16).float())


def test_a_folder_without_its_marker_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    half = checkpoint(tmp_path, 10)
    (half / "complete.json").unlink()
    assert list(checkpoints(tmp_path)) == [5, 10]
    assert list(finished(tmp_path)) == [5]
    assert unfinished(tmp_path) == (half,)


def test_a_successful_save_removes_unfinished_ones_and_all_but_the_newest(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8, 10):
        checkpoint(tmp_path, iteration)
    (tmp_path / "iter_0000004" / "complete.json").unlink()
    (tmp_path / "mine").mkdir()
    assert list(tidy(tmp_path, 10, keep_last=2)) == []
    assert names(tmp_path) == ["iter_0000008", "iter_0000010", "latest_checkpointed_iteration.txt", "mine"]


def test_what_cannot_be_removed_is_said_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (2, 4, 6):
        checkpoint(tmp_path, iteration)

    def refuse(path: Path) -> None:
        raise OSError(f"{path.name} is in use")

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", refuse)
    (said,) = tidy(tmp_path, 6, keep_last=2)
    assert "iter_0000002 could not be removed: iter_0000002 is in use" in said
    # Its marker went first, so what is half removed does not look complete.
    assert list(finished(tmp_path)) == [4, 6]


def test_later_checkpoints_are_set_aside_by_a_run_that_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    for iteration in (5, 10, 15):
        checkpoint(tmp_path, iteration)
    assert [path.name for path in set_aside(tmp_path, 5)] == ["iter_0000010.aside", "iter_0000015.aside"]
    assert list(finished(tmp_path)) == [5]
    checkpoint(tmp_path, 10)
    set_aside(tmp_path, 5)
    assert [name for name in names(tmp_path) if name.startswith("iter")] == [
        "iter_0000005",
        "iter_0000010.aside",
        "iter_0000015.aside",
    ]


def test_a_text_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pointer.txt"
    write_durably(file, "5\n")

    def fail(handle: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(checkpoint_files.os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_durably(file, "10\n")
    assert file.read_text() == "5\n"
    assert names(tmp_path) == ["pointer.txt"]


def test_a_marker_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no complete\.json: it is no checkpoint of this library"):
        Marker.read(tmp_path)
    marker = tmp_path / "complete.json"
    marker.write_text('{"files": ')
    with pytest.raises(CheckpointError, match=r"complete\.json cannot be read: Expecting value"):
        Marker.read(tmp_path)
    for content in ({"format": "other"}, [], {"format": "hetero_megatron checkpoint", "version": 2}):
        marker.write_text(json.dumps(content))
        with pytest.raises(
            CheckpointError, match="is not the marker of a hetero_megatron checkpoint of version 1"
        ):
            Marker.read(tmp_path)


def test_weights_are_not_written_over_a_checkpoint_nor_under_one_name_twice(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0)
    with pytest.raises(CheckpointError, match="iter_0000000 exists and is complete; choose another"):
        checkpoint(tmp_path, 0)
    twice = [("w.weight", torch.ones(2)), ("w.weight", torch.ones(2))]
    with pytest.raises(CheckpointError, match=r"w\.weight came twice among the tensors to write"):
        write_whole(tmp_path, 1, {}, twice)
    assert list(finished(tmp_path)) == [0]


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"run/iter_0000000 cannot be written: Not a directory"):
        checkpoint(tmp_path / "run", 0)


def test_a_payload_that_json_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="payload of a checkpoint must be JSON values: Object of type set"
    ):
        write_whole(tmp_path, 0, {"seen": {1, 2}}, tensors())


def test_parts_that_do_not_make_the_tensor_are_refused(tmp_path: Path) -> None:
    part = checkpoint_write.Part("master", "w.weight", (4, 2), ((0, 3), (0, 2)))
    with pytest.raises(CheckpointError, match=r"master\.w\.weight: .* have 6 elements, the tensor 8"):
        checkpoint_write.metadata_of([part])


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "elsewhere", 1)
    (tmp_path / "iter_0000001").symlink_to(target)
    remove(tmp_path / "iter_0000001")
    assert (target / "complete.json").is_file()
    assert not (tmp_path / "iter_0000001").exists()


@pytest.mark.parametrize("name", ["state.json", "complete.json", "latest_checkpointed_iteration.txt"])
def test_a_failure_at_the_end_names_the_folder_and_that_there_is_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if Path(target).name == name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(
        CheckpointError, match=r"no space to write .*iter_0000004.*: No space left on device; free"
    ):
        checkpoint(tmp_path, 4)
    assert not list(tmp_path.rglob("*.tmp"))
    assert list(finished(tmp_path)) == ([4] if name.startswith("latest") else [])
