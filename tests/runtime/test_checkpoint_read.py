"""Refusals of a saved state (runtime/checkpoint_read.py, checkpoint_header.py)."""

import io
import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime import checkpoint_read
from hetero_megatron.runtime.checkpoint_read import SavedState
from tests.runtime.saved import DAMAGES, checkpoint, tensors

SHAPES = {"first.weight": (40, 8), "second.weight": (40, 8)}


def remark(path: Path, name: str) -> None:
    """Make the marker agree with what a file holds now."""
    marker = json.loads((path / "complete.json").read_text())
    content = (path / name).read_bytes()
    marker["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "complete.json").write_text(json.dumps(marker))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"has no complete\.json: it is no checkpoint of this library"):
        SavedState.open(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "empty", "missing"])
def test_a_shortened_checkpoint_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = checkpoint(tmp_path, 5)
    file = DAMAGES[kind][0](path)
    with pytest.raises(CheckpointError, match=f"iter_0000005 is damaged: {file}"):
        SavedState.open(path)


@pytest.mark.parametrize("name", ["state.json", ".metadata"])
def test_changed_contents_are_found_on_opening(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path, 5)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"is damaged: {name} is not what its marker says"):
        SavedState.open(path)


def test_another_model_is_refused_by_its_parameters(tmp_path: Path) -> None:
    saved = SavedState.open(checkpoint(tmp_path, 5))
    saved.check(SHAPES)
    with pytest.raises(
        CheckpointError, match=r"iter_0000005 is of another model: the model has no second\.weight$"
    ):
        saved.check({"first.weight": (40, 8)})
    more = SHAPES | {f"layers.{n}.wq.weight": (8, 8) for n in range(5)}
    with pytest.raises(
        CheckpointError, match=r"it has no layers\.0\.wq.*, layers\.2\.wq\.weight and 2 more$"
    ):
        saved.check(more)
    with pytest.raises(
        CheckpointError, match=r"first\.weight has shape \[40, 8\] in it and \[48, 8\] in the model"
    ):
        saved.check(SHAPES | {"first.weight": (48, 8)})


def test_tensors_that_are_not_there_are_refused(tmp_path: Path) -> None:
    saved = SavedState.open(checkpoint(tmp_path, 5))
    with pytest.raises(CheckpointError, match=r"has no exp_avg of first\.weight; it has master"):
        saved.read("first.weight", "exp_avg")
    with pytest.raises(CheckpointError, match=r"has no third\.weight"):
        saved.read("third.weight")
    for bounds in (((0, 41), (0, 8)), ((3, 2), (0, 8)), ((0, 4),)):
        with pytest.raises(
            CheckpointError, match=r"first\.weight: bounds .* lie outside the saved shape \[40, 8\]"
        ):
            saved.read("first.weight", bounds=bounds)


def test_elements_that_no_file_has_are_never_zeros(tmp_path: Path) -> None:
    saved = SavedState.open(checkpoint(tmp_path, 5))
    entry = saved.metadata.state_dict_metadata["master.first.weight"]
    entry.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((30, 8)))
    with pytest.raises(
        CheckpointError, match=r"elements of first\.weight \(master\) are in none of its files"
    ):
        saved.read("first.weight")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    saved = SavedState.open(path)
    size = (path / "__0_0.distcp").stat().st_size
    (path / "__0_0.distcp").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=r"iter_0000005: __0_0\.distcp cannot be read: "):
        saved.read("first.weight")


def test_contents_that_name_other_code_are_refused_before_it_runs(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)

    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "harmed",)  # type: ignore[return-value]

    (path / ".metadata").write_bytes(pickle.dumps(Harm()))
    remark(path, ".metadata")
    with pytest.raises(
        CheckpointError, match=r"\.metadata names .*, which does not belong into a checkpoint"
    ):
        SavedState.open(path)
    assert not (tmp_path / "harmed").exists()


def test_contents_that_are_no_contents_are_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    (path / ".metadata").write_bytes(b"not a pickle")
    remark(path, ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: UnpicklingError"):
        SavedState.open(path)
    (path / ".metadata").write_bytes(pickle.dumps({"format": "another"}))
    remark(path, ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it holds no table of contents"):
        SavedState.open(path)


def test_bytes_where_a_tensor_should_be_are_refused() -> None:
    index = MetadataIndex("master.first.weight")
    none = torch.Size(())
    item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
    with pytest.raises(CheckpointError, match=r"master\.first\.weight is no tensor"):
        checkpoint_read._Into({}).load_bytes(item, io.BytesIO())


def test_a_header_of_another_version_or_without_its_keys_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(content | {"version": 2}))
    remark(path, "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json has version 2; this is for version 1"):
        SavedState.open(path)
    del content["parameters"]
    (path / "state.json").write_text(json.dumps(content))
    remark(path, "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: KeyError 'parameters'"):
        SavedState.open(path)


def test_only_the_files_that_hold_a_part_are_opened(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    saved = SavedState.open(path)
    (path / "__1_0.distcp").unlink()
    assert torch.equal(saved.read("first.weight"), dict(tensors(5))["first.weight"])
