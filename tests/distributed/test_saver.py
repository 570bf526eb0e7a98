"""Saving while training goes on: stages, votes, failures (runtime/checkpoint.py)."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime import checkpoint
from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.checkpoint_files import finished, read_pointer
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.checkpoint_write import Written
from hetero_megatron.runtime.session import Session
from tests.distributed.saving import Run, run


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_training_goes_on_while_one_rank_still_writes_and_all_learn_of_the_end_at_one_step(
    tmp_path: Path,
) -> None:
    write = checkpoint.write_parts

    def work(each: Run) -> Any:
        gate = threading.Event()

        def wait_and_write(*arguments: Any) -> Written:
            gate.wait()
            return write(*arguments)

        checkpoint.write_parts = wait_and_write  # type: ignore[assignment]
        if each.world.rank == 1:  # it has copies only, which the first one writes
            gate.set()
        each.step()
        each.step()
        held = each.session.shards()
        assert each.save() is None
        ended = [each.step() for _ in range(3)]
        assert each.saver.is_pending
        assert not finished(tmp_path)
        gate.set()
        while each.saver.is_pending:
            ended.append(each.step())
        return ended, held

    found = run(work, lambda session: Saver(tmp_path, session, say=lambda text: None))
    (ended, held), (other, _) = found[0], found[1]
    assert ended == other
    assert ended[:3] == [None, None, None]
    assert ended[-1] == Saved(2, tmp_path / "iter_0000002")
    saved = SavedState.open(tmp_path / "iter_0000002")
    for name, kinds in held.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(saved.read(name, kind), kinds[kind]), (
                "later steps must not reach what is saved"
            )


def test_a_new_save_waits_for_the_one_before_and_old_ones_are_pruned(tmp_path: Path) -> None:
    def work(each: Run) -> Any:
        ended = []
        for _ in range(4):
            each.step()
            ended.append(each.save())
        return [*ended, each.saver.finish(), each.saver.finish()]

    found = run(work, lambda session: Saver(tmp_path, session, keep_last=2, say=lambda text: None))
    saved = [Saved(number, tmp_path / f"iter_{number:07d}") for number in (1, 2, 3, 4)]
    # A save may also end in the step before the next one starts.
    for ended in found.values():
        assert [each for each in ended if each in saved][-1] == saved[-1]
        assert ended[-1] is None
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
    assert read_pointer(tmp_path) == "4"


def test_ranks_that_wait_for_a_slow_disk_meet_before_a_message_would_time_out(tmp_path: Path) -> None:
    write = checkpoint.write_parts

    def work(each: Run) -> Any:
        met = []

        def write_when_the_others_have_met_thrice(*arguments: Any) -> Written:
            while len(met) < 3:
                time.sleep(0.001)
            return write(*arguments)

        def meet(votes: Any) -> Any:
            met.append(votes)
            return Saver.settle(each.saver, votes)

        if each.world.rank == 0:
            checkpoint.write_parts = write_when_the_others_have_met_thrice  # type: ignore[assignment]
        each.saver.settle = meet  # type: ignore[method-assign]
        each.saver._patience = 0.01
        each.step()
        return each.save(), len(met)

    found = run(work, lambda s: Saver(tmp_path, s, asynchronous=False, say=lambda text: None))
    assert found[0] == found[1]
    assert found[0][0] == Saved(1, tmp_path / "iter_0000001")
    assert found[0][1] >= 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_cannot_write_is_named_on_all_ranks_and_the_save_before_stays(
    tmp_path: Path, asynchronous: bool
) -> None:
    write = checkpoint.write_parts
    said: list[str] = []

    def work(each: Run) -> Any:
        def fail(*arguments: Any) -> Written:
            if each.world.rank == 1:
                raise PermissionError(13, "Permission denied")
            return write(*arguments)

        each.step()
        each.save()
        each.saver.finish()
        each.step()
        checkpoint.write_parts = fail  # type: ignore[assignment]
        ended = [each.save()]
        ended += [each.step(), each.step(), each.step(), each.saver.finish()]
        before = names(tmp_path)
        torch.distributed.barrier()
        checkpoint.write_parts = write
        each.save()
        each.saver.finish()
        return [end for end in ended if end], before, list(said)

    def make(session: Session) -> Saver:
        return Saver(tmp_path, session, asynchronous=asynchronous, say=said.append)

    found = run(work, make)
    for ended, before, _ in found.values():
        (failed,) = ended
        assert isinstance(failed, Failed)
        assert failed.iteration == 2
        assert "iteration 2 was not saved: rank 1: " in failed.text
        assert "iter_0000002 cannot be written: Permission denied" in failed.text
        assert before == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert any(text.startswith("WARNING: iteration 2 was not saved: rank 1") for text in found[0][2])
    assert found[1][2] == []
    assert names(tmp_path) == ["iter_0000001", "iter_0000005", "latest_checkpointed_iteration.txt"]


def test_a_failed_save_can_stop_the_run(tmp_path: Path) -> None:
    def work(each: Run) -> str:
        def fail(*arguments: Any) -> Written:
            raise ValueError("a defect")

        checkpoint.write_parts = fail  # type: ignore[assignment]
        each.step()
        with pytest.raises(CheckpointError) as refusal:
            each.save()
        return str(refusal.value)

    texts = run(work, lambda s: Saver(tmp_path, s, asynchronous=False, stop_on_failure=True)).values()
    assert set(texts) == {
        "iteration 1 was not saved: rank 0: ValueError: a defect; rank 1: ValueError: a defect"
    }


def test_a_rank_without_memory_for_a_snapshot_is_named(tmp_path: Path) -> None:
    def work(each: Run) -> Any:
        def fail() -> None:
            raise MemoryError("cannot allocate")

        if each.world.rank == 0:
            each.saver._snapshot.take = fail  # type: ignore[assignment]
        each.step()
        each.save()
        return [each.step(), each.saver.finish()]

    found = run(work, lambda s: Saver(tmp_path, s, say=lambda text: None))
    assert found[0] == found[1]
    assert f"rank 0: no snapshot of {3 * 4 * 43_296} bytes: cannot allocate" in found[0][0].text


def test_the_first_rank_may_fail_at_the_end_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    """The old one may go only when the new one is complete, even where one is kept."""

    def work(each: Run) -> Any:
        def fail(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        each.step()
        each.save()
        checkpoint.finish = fail  # type: ignore[assignment]
        each.step()
        return each.save()

    make = lambda s: Saver(tmp_path, s, keep_last=1, asynchronous=False, say=lambda text: None)  # noqa: E731
    found = run(work, make)
    assert found[0] == found[1]
    assert "rank 0: no space to write" in found[0].text
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert read_pointer(tmp_path) == "1"


def test_trouble_with_old_checkpoints_does_not_cost_the_new_one(tmp_path: Path) -> None:
    said: list[str] = []

    def work(each: Run) -> Any:
        def fail(*arguments: Any) -> list[str]:
            raise PermissionError(13, "Permission denied")

        checkpoint.tidy = fail  # type: ignore[assignment]
        each.step()
        return each.save(), said

    make = lambda s: Saver(tmp_path, s, asynchronous=False, say=said.append)  # noqa: E731
    ended, told = run(work, make, ranks=(0,))[0]
    assert ended == Saved(1, tmp_path / "iter_0000001")
    assert list(finished(tmp_path)) == [1]
    assert told[-1] == "WARNING: old checkpoints were not removed: [Errno 13] Permission denied"


def test_an_iteration_that_is_saved_is_not_saved_again_and_later_ones_are_set_aside(tmp_path: Path) -> None:
    def first(each: Run) -> None:
        for _ in range(3):
            each.step()
            each.save()

    run(first, lambda s: Saver(tmp_path, s, asynchronous=False, say=lambda text: None), ranks=(0,))
    said: list[str] = []

    def again(each: Run) -> Any:
        ended = [each.save()]
        each.step()
        return [*ended, each.save()], said

    saved = SavedState.open(tmp_path / "iter_0000001")
    make = lambda s: Saver(tmp_path, s, asynchronous=False, say=said.append)  # noqa: E731
    ended, told = run(again, make, saved, ranks=(0,))[0]
    assert ended == [Saved(1, tmp_path / "iter_0000001"), Saved(2, tmp_path / "iter_0000002")]
    assert "iter_0000003 is later than iteration 1, from which this run goes on" in told[1]
    assert [name for name in names(tmp_path) if name.startswith("iter")] == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000002.aside",
        "iter_0000003.aside",
    ]


def test_weights_alone_start_with_moments_of_zero_and_say_so(tmp_path: Path) -> None:
    from hetero_megatron.runtime.checkpoint_write import write_whole

    def shards(each: Run) -> Any:
        return each.session.shards(), each.session.state.step, each.session.iteration

    fresh = run(shards, lambda s: Saver(tmp_path / "a", s), ranks=(0,))[0][0]
    path = write_whole(tmp_path, 40, {}, [(name, 2 * kinds["master"]) for name, kinds in fresh.items()])
    got, step, iteration = run(shards, lambda s: Saver(tmp_path / "b", s), SavedState.open(path), ranks=(0,))[
        0
    ]
    assert (step, iteration) == (0, 40)
    for name, kinds in fresh.items():
        assert torch.equal(got[name]["parameter"], 2 * kinds["parameter"])
        assert not got[name]["exp_avg"].any()


def test_settings_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    def work(each: Run) -> list[str]:
        texts = []
        for arguments in ({"keep_last": 0}, {"folder": tmp_path / "file" / "run"}):
            with pytest.raises(CheckpointError) as refusal:
                Saver(**({"folder": tmp_path, "session": each.session} | arguments))  # type: ignore[arg-type]
            texts.append(str(refusal.value))
        return texts

    (tmp_path / "file").write_text("no folder")
    found = run(work, lambda s: Saver(tmp_path, s))
    assert found[0] == found[1]
    assert "keep_last is 0; at least the newest checkpoint is kept" in found[0][0]
    assert "file/run cannot be written: Not a directory" in found[0][1]
