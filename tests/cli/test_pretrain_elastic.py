"""`pretrain --elastic`: a run as a person sees it that loses ranks, goes on, and goes back to a checkpoint if it must."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron import elastic, train
from hetero_megatron.errors import RecipeError, StrategyError
from hetero_megatron.recipe import load_recipe
from tests.cli.commands import SMALL

STEPS = "training: {train_iters: 6, global_batch_size: 3, seq_length: 64, lr: 1e-2, log_interval: 1}"
RECIPE = SMALL.partition("training:")[0] + STEPS


def recipe(folder: Path, more: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"{RECIPE}\n{more}\noutput: {folder / 'run'}\n")
    return path


def pretrain(path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hetero_megatron", "pretrain", *options, str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [(each["iteration"], each["loss"]) for each in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(recipe(folder, "")).returncode == 0
    return losses(folder)


def test_a_rank_that_is_killed_while_saving_changes_no_loss(
    tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    fault = "elastic: {faults: [{kind: kill, rank: 0, iteration: 4, phase: saving}]}"
    ended = pretrain(recipe(tmp_path, f"checkpoint: {{interval: 2}}\n{fault}"), "--elastic")
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path) == [(n, pytest.approx(loss, rel=1e-5)) for n, loss in undisturbed]
    assert "survival: no loss of a single rank loses anything" in ended.stdout
    assert "rank 0 was killed by SIGKILL in saving of iteration 4; noticed by rank" in ended.stdout
    assert "going on with ranks 1-3 after iteration 4" in ended.stdout
    assert (tmp_path / "run" / "iter_0000006" / "complete.json").exists()


def test_what_nobody_has_left_comes_from_the_last_checkpoint(
    tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    faults = ", ".join(f"{{kind: kill, rank: {rank}, iteration: 5, phase: backward}}" for rank in (2, 3))
    more = f"checkpoint: {{interval: 3, asynchronous: false}}\nelastic: {{faults: [{faults}]}}"
    ended = pretrain(recipe(tmp_path, more), "--elastic")
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path) == [(n, pytest.approx(loss, rel=1e-5)) for n, loss in undisturbed]
    assert "back to the last checkpoint; going on with ranks 0-1 after iteration 3" in ended.stdout
    assert "layer 1" in ended.stdout


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (elastic.Place(1), "several nodes need --endpoint HOST:PORT, the address of node 0"),
        (elastic.Place(0, "here"), "--endpoint 'here' is no HOST:PORT, such as node0:29500"),
        (
            elastic.Place(1, "node0:1"),
            "--node-rank 1 and --nodes-present 1: the strategy has ranks on 1 nodes, numbered 0 to 0",
        ),
    ],
)
def test_nodes_that_do_not_fit_are_refused(tmp_path: Path, place: elastic.Place, told: str) -> None:
    run = train.prepare(load_recipe(recipe(tmp_path, "")))
    with pytest.raises(StrategyError) as refused:
        elastic.pretrain_elastic(run, place)
    assert told in str(refused.value)


def test_a_fault_of_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    fault = "elastic: {faults: [{kind: kill, rank: 7, iteration: 4, phase: saving}]}"
    run = train.prepare(load_recipe(recipe(tmp_path, fault)))
    with pytest.raises(
        StrategyError, match=r"elastic.faults: rank 7 is none of the strategy's ranks \[0, 1, 2, 3\]"
    ):
        elastic.pretrain_elastic(run)


def test_an_unknown_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="phase"):
        load_recipe(recipe(tmp_path, "elastic: {faults: [{kind: kill, rank: 0, iteration: 4, phase: x}]}"))
