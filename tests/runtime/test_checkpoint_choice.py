"""Which checkpoint a run goes on from (runtime/checkpoint_choice.py; O-59, O-60)."""

import os
import re
from pathlib import Path

import pytest

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_choice import agree_on_checkpoint, choose, choose_together, verify
from hetero_megatron.runtime.checkpoint_write import write_whole
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.runtime.saved import DAMAGES, checkpoint, tensors


def two(folder: Path) -> Path:
    """Checkpoints of iterations 5 and 10."""
    checkpoint(folder, 5)
    checkpoint(folder, 10)
    return folder


def test_auto_takes_the_newest_and_says_nothing_when_all_is_well(tmp_path: Path) -> None:
    said: list[str] = []
    assert choose(two(tmp_path), "auto", said.append) == tmp_path / "iter_0000010"
    assert said == []


def test_auto_starts_anew_in_an_empty_or_missing_folder_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    assert choose(tmp_path, "auto", said.append) is None
    assert choose(tmp_path / "not there", "auto", said.append) is None
    assert all("starting at iteration 0" in text for text in said)
    assert len(said) == 2


def test_a_number_is_met_or_refused(tmp_path: Path) -> None:
    assert choose(two(tmp_path), 5) == tmp_path / "iter_0000005"
    with pytest.raises(CheckpointError, match="has no checkpoint of iteration 7; it has iterations 5, 10"):
        choose(tmp_path, 7)
    with pytest.raises(CheckpointError, match="checkpoint of iteration 7: there is no folder .*not there"):
        choose(tmp_path / "not there", 7)
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(CheckpointError, match=r"of iteration 7 \(iter_0000007 is the rest of a save"):
        choose(tmp_path, 7)


def test_never_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert choose(tmp_path, "never") is None
    with pytest.raises(CheckpointError, match="resume is never, and .* has checkpoints of iterations 5, 10"):
        choose(two(tmp_path), "never")


@pytest.mark.parametrize("text", ["", "abc", "15", "5"])
def test_a_pointer_that_is_wrong_is_said_and_not_followed(tmp_path: Path, text: str) -> None:
    (two(tmp_path) / "latest_checkpointed_iteration.txt").write_text(text)
    said: list[str] = []
    assert choose(tmp_path, "auto", said.append) == tmp_path / "iter_0000010"
    assert said == [
        f"{tmp_path}/latest_checkpointed_iteration.txt says {text!r}; the newest whole checkpoint, iter_0000010, is used"
    ]


def test_a_pointer_without_checkpoints_is_said(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("15")
    said: list[str] = []
    assert choose(tmp_path, "auto", said.append) is None
    assert "says '15'; and there is no checkpoint" in said[0]


def test_an_unfinished_save_is_said_and_not_used(tmp_path: Path) -> None:
    (two(tmp_path) / "iter_0000010" / "complete.json").unlink()
    said: list[str] = []
    assert choose(tmp_path, "auto", said.append) == tmp_path / "iter_0000005"
    assert "iter_0000010 is the rest of a save that was never finished" in said[0]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: object, reason: str) -> None:
    path = two(tmp_path) / "iter_0000010"
    file = damage(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=f"iter_0000010 is damaged: {file} {reason}"):
        verify(path, checksums=True)


@pytest.mark.parametrize("kind", ["cut", "empty", "missing"])
def test_auto_passes_over_a_shortened_one_and_a_number_does_not(tmp_path: Path, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    file = damage(two(tmp_path) / "iter_0000010")
    said: list[str] = []
    assert choose(tmp_path, "auto", said.append) == tmp_path / "iter_0000005"
    assert re.search(f"WARNING: .*iter_0000010 is damaged: {file} {reason}.*; it is passed over", said[0])
    assert "going on from the checkpoint before" in " ".join(said)
    with pytest.raises(CheckpointError, match=f"iter_0000010 is damaged: {file} {reason}"):
        choose(tmp_path, 10)


def test_auto_never_starts_anew_beside_damaged_checkpoints(tmp_path: Path) -> None:
    for iteration in (5, 10):
        (checkpoint(tmp_path, iteration) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*iter_0000010 .*; .*iter_0000005 "):
        choose(tmp_path, "auto", lambda text: None)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5).rename(tmp_path / "iter_0000006")
    with pytest.raises(CheckpointError, match="the folder says iteration 6, its marker 5"):
        verify(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path, 5)
    stat = Path.stat

    def refuse(self: Path, **options: bool) -> object:
        if self.name == "__0_0.distcp":
            raise PermissionError(13, "Permission denied")
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: Permission denied"):
        verify(path)


def test_all_ranks_choose_alike_or_refuse_alike(tmp_path: Path) -> None:
    """One start of processes for every way in which two ranks can see something else than they should."""
    for kind, (damage, _) in DAMAGES.items():
        damage(two(tmp_path / kind) / "iter_0000010")
    two(tmp_path / "whole")
    write_whole(tmp_path / "other", 5, {}, tensors(99))
    for iteration in (5, 10):
        DAMAGES["flipped"][0](checkpoint(tmp_path / "ruined", iteration))

    def work(world: World) -> dict[str, tuple[str, list[str]]]:
        found = {}

        def attempt(name: str, folder: Path, resume: object) -> None:
            said: list[str] = []
            try:
                path = choose_together(world, folder, resume, said.append)  # type: ignore[arg-type]
                found[name] = path.name if path else "none", said
            except CheckpointError as error:
                found[name] = f"refused: {error}", said

        for kind in (*DAMAGES, "whole", "ruined", "empty folder"):
            attempt(kind, tmp_path / kind, "auto")
            attempt(f"{kind} 10", tmp_path / kind, 10)
        here = tmp_path / ("whole" if world.rank == 0 else "nowhere")
        attempt("seen by rank 0 only", here, "auto")
        attempt("seen by rank 0 only 10", here, 10)
        attempt("two of one name", tmp_path / ("whole" if world.rank == 0 else "other"), 5)
        os.chdir(tmp_path / ("whole" if world.rank == 0 else "other"))
        attempt("two of one path", Path(), 5)
        try:
            agree_on_checkpoint(world, tmp_path / "cut" / "iter_0000010")
        except CheckpointError as error:
            found["agree"] = str(error), []
        return found

    by_rank = run_ranks((0, 1), work)
    assert {n: text for n, (text, _) in by_rank[0].items()} == {
        n: text for n, (text, _) in by_rank[1].items()
    }
    texts = {name: text for name, (text, _) in by_rank[0].items()}
    said = {name: " ".join(lines) for name, (_, lines) in by_rank[0].items()}
    assert not any(lines for _, lines in by_rank[1].values()), "only the first rank says what is chosen"
    for kind, (_, reason) in DAMAGES.items():
        assert texts[kind] == "iter_0000005"
        assert "WARNING" in said[kind]
        assert "iter_0000010 is damaged" in said[kind]
        assert re.search(
            f"refused: .*iter_0000010 is damaged: .*__[01]_0.distcp {reason}", texts[f"{kind} 10"]
        )
    assert (texts["whole"], said["whole"]) == ("iter_0000010", "")
    assert texts["empty folder"] == "none"
    assert re.search("refused: .*ruined: no checkpoint is whole", texts["ruined"])
    assert re.search(
        "refused: rank 0 goes on from .*whole/iter_0000010, and rank 1 from no checkpoint; all ranks have to see",
        texts["seen by rank 0 only"],
    )
    assert re.search(
        "refused: rank 1: checkpoint of iteration 10: there is no", texts["seen by rank 0 only 10"]
    )
    assert re.search(
        "refused: rank 0 goes on from .*whole/iter_0000005, and rank 1 from .*other/iter_0000005;",
        texts["two of one name"],
    )
    assert (
        "rank 0 goes on from iter_0000005, and rank 1 from another one of that name;"
        in texts["two of one path"]
    )
    assert re.search("rank 0, 1: .*iter_0000010 is damaged", texts["agree"])
