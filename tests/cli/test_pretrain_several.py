"""`pretrain` with a list of strategies: one of them per step, chosen by its documents, and the weights of one device."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron import train
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.planner.profiles import PHASES, UNITS, Measurement, Profiles
from hetero_megatron.recipe import load_recipe
from hetero_megatron.run import Run, prepare
from hetero_megatron.runtime.checkpoint_parts import MASTER
from hetero_megatron.runtime.checkpoint_read import SavedState
from tests.cli.commands import run
from tests.distributed.training import ATOL, LOSS_RTOL, RTOL, reference

# Unequal TP beside a pipeline of one rank, TP with PP, and context parallelism, all on the states of the first.
RECIPE = """
model: {preset: llama_tiny, num_layers: 4, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2}
strategy:
- name: mixed
  max_length: 40
  zero: 1
  pipelines:
  - {micro_batches: 2, max_tokens: 64, stages: [{ranks: 0-1, layers: 0-2}, {ranks: 2, layers: 3}]}
  - {micro_batches: 1, max_tokens: 64, stages: [{ranks: 3, layers: 0-3}]}
- name: long
  zero: 1
  pipelines:
  - {micro_batches: 2, stages: [{ranks: 0-1, layers: 0-1}, {ranks: 2-3, layers: 2-3}]}
- name: parts
  max_length: 80
  zero: 1
  pipelines:
  - {micro_batches: 2, stages: [{ranks: 0-3, layers: 0-3, tp: 2, cp: 2}]}
data: {packing: documents, long_documents: drop, workers: 2}
planning: {profile: PROFILE}
training: {train_iters: 10, global_batch_size: 1, seq_length: 128, lr: 1e-3, adam_eps: 1e-4, log_interval: 1}
"""


def corpus(folder: Path) -> Path:
    """Text files of 10 to 120 bytes, many short ones among them."""
    random.seed(6)
    folder.mkdir()
    for number in range(60):
        size = random.randint(10, 38) if number % 5 else random.randint(40, 120)
        (folder / f"{number:03}.txt").write_text("".join(random.choices("abcdefgh \n", k=size)))
    return folder


def profile(path: Path) -> Path:
    """A machine on which tensor parallelism is slow: the shorter a strategy's documents must be, the faster it is."""
    seconds = {(1, 1): 1e-3, (2, 1): 2.4e-3, (2, 2): 0.9e-3}
    measured = [
        Measurement("cpu", "fp32", unit, phase, tp, cp, tokens, tokens, rate * tokens)
        for unit in UNITS
        for phase in PHASES
        for (tp, cp), rate in seconds.items()
        for tokens in (64, 128)
    ]
    path.write_text(Profiles({}, tuple(measured)).to_json())
    return path


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"OMP_NUM_THREADS": "1"}


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    path = folder / "several.yaml"
    texts = corpus(folder / "texts")
    held_out = f"evaluation: {{data: {{folder: {texts}, packing: documents}}, interval: 5, iters: 2}}\n"
    text = RECIPE.replace("data: {", f"data: {{folder: {texts}, ") + held_out
    text = text.replace("PROFILE", str(profile(folder / "machine.json")))
    path.write_text(
        text + f"logging: {{tensorboard: true}}\ncheckpoint: {{interval: 3}}\noutput: {folder / 'whole'}\n"
    )
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path) -> str:
    """What a run prints that is never interrupted."""
    with (recipe.parent / "told.txt").open("w+") as told, contextlib.redirect_stdout(told):
        assert train.pretrain(prepare(load_recipe(recipe))) == 0
        told.seek(0)
        return told.read()


@pytest.fixture(scope="module")
def resumed(recipe: Path, whole: str) -> Path:
    """The folder of a run of which one rank was asked to stop, and which went on under a launcher for three steps."""
    folder = recipe.parent / "resumed"
    changes = (str(recipe), f"output={folder}")
    command = [sys.executable, "-m", "hetero_megatron", "pretrain", *changes, "training.train_iters=2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as stopped:
        try:
            assert stopped.stdout is not None
            while not stopped.stdout.readline().startswith(" iteration        2/"):
                assert stopped.poll() is None
            ranks = Path(f"/proc/{stopped.pid}/task/{stopped.pid}/children").read_text().split()
            os.kill(int(ranks[2]), signal.SIGTERM)
            out, _ = stopped.communicate(timeout=60)
            assert stopped.returncode == 0
        finally:
            stopped.kill()
    made = len(metrics(folder))
    assert f"stopped by a signal to another rank after iteration {made} of 2000" in out
    launcher = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "hetero_megatron.train",
    )
    done = process(*launcher, *changes, f"training.train_iters={made + 3}")
    assert done.returncode == 0, done.stderr
    assert f"going on from {folder}/iter_{made:07}: iteration {made}, sample " in done.stdout
    assert len(metrics(folder)) == made + 3
    return folder


def documents_of(run: Run, iters: int) -> list[tuple[tuple[int, ...], ...]]:
    """The documents of the first steps."""
    steps, position, found = run.data.steps, DataPosition(), []
    while len(found) < iters and (step := steps.at(position)) is not None:
        pieces = (piece for number in step.numbers for piece in steps.samples.sample(number))
        found.append(tuple(tuple(piece.tokens_T.tolist()) for piece in pieces))
        position = steps.after(step)
    return found


def assert_one_device(folder: Path, recipe: Path) -> None:
    """Losses of all steps, and the last weights."""
    ready = prepare(load_recipe(recipe, [f"output={recipe.parent / 'unused'}"]))
    losses = [line["loss"] for line in metrics(folder)]
    wanted = reference(
        documents_of(ready, len(losses)), ready.config, ready.settings, seed=ready.recipe.training.seed
    )
    assert losses == pytest.approx(wanted.losses, rel=LOSS_RTOL)
    saved = SavedState.open(folder / f"iter_{len(losses):07}")
    for name, tensors in wanted.tensors.items():
        full = tuple((0, size) for size in tensors["parameter"].shape)
        torch.testing.assert_close(
            saved.read(name, MASTER, full), tensors["parameter"], rtol=RTOL, atol=ATOL, msg=name
        )


def test_a_run_that_switches_has_the_losses_and_weights_of_one_device(whole: str, recipe: Path) -> None:
    folder = recipe.parent / "whole"
    assert_one_device(folder, recipe)
    taken = [line["strategy"] for line in metrics(folder)]
    assert set(taken) == {"mixed", "long", "parts"}, "each of the three strategies has trained"


def test_a_run_stopped_amid_goes_on_under_a_launcher_with_the_same_samples(
    resumed: Path, recipe: Path
) -> None:
    assert_one_device(resumed, recipe)
    first, second = metrics(recipe.parent / "whole"), metrics(resumed)
    assert all(a["first_sample"] == b["first_sample"] for a, b in zip(first, second, strict=False))


def test_no_document_is_longer_than_its_strategy_takes(whole: str, recipe: Path) -> None:
    most = {"mixed": 40, "parts": 80, "long": 128}
    for line in metrics(recipe.parent / "whole"):
        assert line["longest_document"] <= most[line["strategy"]]
        assert sum(tokens for _, tokens in line["lengths"].values()) <= 128
        assert sum(count for count, _ in line["lengths"].values()) == (
            line["consumed_samples"] - line["first_sample"]
        )


def test_each_switch_has_a_line_and_its_seconds_are_in_the_metrics(whole: str, recipe: Path) -> None:
    lines = [line for line in whole.splitlines() if line.startswith("  strategy ")]
    pattern = (
        r"  strategy (\w+) -> (\w+): \d+\.\d\d MB moved, rank \d the slowest sender with \d+\.\d\d MB, "
        r"in (\d+\.\d{3}) s \(gather \d+\.\d{3}\)"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    turns = [(match[1], match[2]) for match in found if match]
    assert len(turns) == len(lines) > 2
    assert all(before[1] == after[0] for before, after in pairwise(turns))
    took = metrics(recipe.parent / "whole")
    assert sum(line["switch_seconds"] for line in took) == pytest.approx(
        sum(float(match[3]) for match in found if match), abs=1e-3 * len(lines)
    )
    names = ["mixed", "long", "parts"]
    assert all(names[line["strategy_number"]] == line["strategy"] for line in took)
    steps = [line for line in whole.splitlines() if line.startswith(" iteration ")]
    shorts = {"mixed": "mixed TP2>TP1+TP1", "long": "long TP2>TP2", "parts": "parts TP2CP2"}
    for text, line in zip(steps, took, strict=True):
        assert f"| strategy: {shorts[line['strategy']]} |" in text


def test_the_summary_says_who_made_how_many_steps(whole: str, recipe: Path) -> None:
    taken = [line["strategy"] for line in metrics(recipe.parent / "whole")]
    for name in set(taken):
        assert f"{name}: {taken.count(name)} steps, " in whole
    switches = sum(line.startswith("  strategy ") for line in whole.splitlines())
    assert re.search(rf"{switches} switches in \d+\.\d{{3}} s, \d+\.\d% of the time", whole)


def test_evaluation_has_the_strategy_for_the_longest_documents(whole: str, recipe: Path) -> None:
    assert prepare(load_recipe(recipe)).evaluates == "long"
    assert whole.count(" validation loss at iteration ") == 2
    measured = [
        line["evaluation_loss"] for line in metrics(recipe.parent / "whole") if "evaluation_loss" in line
    ]
    assert len(measured) == 2
    lines = whole.splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith("  strategy "))
    assert " -> long: " in lines[last], "training ends with an evaluation"


def test_the_strategies_are_shown_by_name_before_the_first_step(whole: str) -> None:
    head = whole[: whole.index("kernels:")]
    assert [line for line in head.splitlines() if line.endswith(":")] == ["mixed:", "long:", "parts:"]


def test_tensorboard_has_the_strategy_s_number(whole: str, recipe: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(recipe.parent / "whole" / "tensorboard"))
    found.Reload()
    assert {"strategy_number", "switch_seconds", "longest_document"} <= set(found.Tags()["scalars"])


def test_a_run_is_drawn(whole: str, recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, file = recipe.parent / "whole", tmp_path / "run.png"
    assert run("plot", str(folder), "-o", str(file)).out == f"10 steps drawn into {file}\n"
    assert file.read_bytes().startswith(b"\x89PNG")


def test_elastic_runs_have_one_strategy(recipe: Path) -> None:
    ended = run("pretrain", "--elastic", str(recipe))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"error: {recipe}: strategy: an elastic run has one strategy, and this recipe has mixed, long, parts; leave "
        "--elastic out, or write one of them in the place of the list\n"
    )
