"""Stopping and going on: signals end a run after its step, and whatever resumes sees the next sample (O-66)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.commands import SMALL

ENDLESS = 2000
LONG = "training.train_iters=2000"
CHANGES = ("training.log_interval=1", "data.workers=2")


def command(recipe: str, folder: Path, *changes: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "hetero_megatron",
        "pretrain",
        recipe,
        f"output={folder}",
        *CHANGES,
        *changes,
    ]


def trained(recipe: str, folder: Path, *changes: str) -> str:
    """What a run that ends by itself prints."""
    done = subprocess.run(
        command(recipe, folder, *changes),
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture(scope="module")
def losses(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained(recipe, folder, "training.train_iters=120")
    return [line["loss"] for line in metrics(folder)]


@pytest.fixture
def running(recipe: str, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a run in its own process group and waits until it has made two steps."""
    started: list[subprocess.Popen[str]] = []

    def start(*changes: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command(recipe, tmp_path, LONG, *changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        assert process.stdout is not None
        while not process.stdout.readline().startswith(" iteration        2/"):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def to_the_group(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGTERM)


def to_one_rank(process: "subprocess.Popen[str]") -> None:
    os.kill(children(process.pid)[2], signal.SIGTERM)


def to_the_parent_twice(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)


def interrupted(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGINT)


SAVING = ("checkpoint.interval=1",)
EVALUATING = ("evaluation={data: {}, interval: 1, iters: 20}",)


@pytest.mark.parametrize(
    ("send", "changes"),
    [(to_the_group, SAVING), (to_one_rank, EVALUATING), (to_the_parent_twice, ()), (interrupted, ())],
    ids=["group, amid saving", "one rank, amid evaluation", "twice", "SIGINT"],
)
def test_a_signal_ends_the_run_after_its_step_and_everything_is_saved(
    send: Callable[["subprocess.Popen[str]"], None],
    changes: tuple[str, ...],
    running: Callable[..., "subprocess.Popen[str]"],
    recipe: str,
    tmp_path: Path,
    losses: list[float],
) -> None:
    process = running(*changes)
    ranks = children(process.pid)
    send(process)
    told = ended(process)
    iteration = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    asked = "SIGINT" if send is interrupted else "SIGTERM"
    by = (
        f"stopped by {asked} after"
        if send is not to_one_rank
        else "stopped by a signal to another rank after"
    )
    assert f"{by} iteration {iteration} of {ENDLESS}; everything is saved in {tmp_path}" in told
    assert [line["iteration"] for line in metrics(tmp_path)] == list(range(1, iteration + 1))
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    if changes:
        trained(recipe, tmp_path, f"training.train_iters={iteration + 2}")
    found = [line["loss"] for line in metrics(tmp_path)]
    assert len(found) == iteration + 2 * bool(changes)
    assert found == losses[: len(found)], "a resumed run goes on with the next sample, bit by bit"
