"""`pretrain`: a real run as a person sees it, under a launcher too; and what is refused before it starts."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron import train
from tests.cli.commands import C2, SMALL, refusal

FIELDS = {
    *("iteration", "loss", "grad_norm", "lr", "valid_tokens", "step_seconds", "tokens_per_second"),
    *("first_sample", "consumed_samples", "consumed_tokens", "padding_share", "data_wait_seconds"),
    *("compute_seconds", "communication_seconds", "bubble_seconds", "tflops_per_device", "time"),
}
PIPELINES = "strategy.pipelines"
FIRST, SECOND, OTHER = (f"{PIPELINES}.{at}" for at in ("0.stages.0", "0.stages.1", "1.stages.0"))


def started(*arguments: str) -> "subprocess.Popen[str]":
    """`python -m ...` with piped output."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def ended_with(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """A process that does not outlive its test."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(SMALL + f"output: {path.parent / 'run'}\n")
    return str(path)


@pytest.fixture(scope="module")
def shown(recipe: str) -> str:
    """What a run of three steps prints."""
    with ended_with(started("hetero_megatron", "pretrain", recipe)) as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert err == ""
    return out


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank is started, no group made, and no child left behind."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a refused recipe has started something")

    monkeypatch.setattr(train, "fork_ranks", never)
    monkeypatch.setattr(train.World, "join", never)
    monkeypatch.setattr(torch.distributed, "init_process_group", never)
    before = set(children(os.getpid()))
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 20
    assert set(children(os.getpid())) <= before


def test_a_run_names_its_kernels_once_and_says_why_not_others(shown: str) -> None:
    assert shown.count("kernels:") == 1
    assert (
        "\nkernels: attention torch-sdpa, rms_norm torch, cross_entropy torch, adam torch\n  passed over: "
        "flash-attn, transformer-engine, torch-varlen, apex: needs a CUDA device (this run is on cpu)\n"
    ) in shown


@pytest.mark.parametrize(
    ("op", "name"),
    [("attention", "flash-attn"), ("rms_norm", "apex"), ("adam", "transformer-engine")],
)
def test_a_kernel_that_is_asked_for_and_cannot_run_is_refused_before_anything_starts(
    unstarted: None, recipe: str, op: str, name: str
) -> None:
    assert refusal("pretrain", recipe, f"kernels.{op}={name}") == (
        f"{recipe}: kernels.{op}: {name} cannot run here: it needs a CUDA device (this run is on cpu)"
    )


def test_an_attention_kernel_is_not_passed_over_in_silence_by_the_ring(unstarted: None, recipe: str) -> None:
    shared = f"{PIPELINES}=[{{micro_batches: 3, micro_batch_size: 1, stages: [{{ranks: 0-1, layers: 0-1, cp: 2}}]}}]"
    assert refusal("pretrain", recipe, shared, "kernels.attention=torch-sdpa") == (
        f"{recipe}: kernels.attention: torch-sdpa has no ring form, and pipelines with cp > 1 would pass it over; "
        "leave it auto, or use context_parallel ulysses"
    )


def test_an_adam_kernel_is_refused_where_the_optimizer_is_another_one(unstarted: None, recipe: str) -> None:
    assert refusal("pretrain", recipe, "training.optimizer=sgd", "kernels.adam=torch") == (
        f"{recipe}: kernels.adam: torch is named and the optimizer is sgd; leave it auto, or use optimizer adam"
    )


def test_a_run_with_sgd_says_so_and_names_no_adam(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "fork_ranks", lambda *_, **__: 0)
    changes = ["training.optimizer=sgd", f"output={tmp_path}"]
    assert train.pretrain(train.prepare(train.load_recipe(recipe, changes))) == 0
    told = capsys.readouterr().out
    assert "kernels: attention torch-sdpa, rms_norm torch, cross_entropy torch\n" in told
    assert "\noptimizer: sgd\n" in told
    assert "adam" not in told


def test_a_run_shows_its_strategy_its_steps_and_a_summary(shown: str, recipe: str) -> None:
    lines = shown.splitlines()
    assert lines[0].strip() == "strategy"
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert rows[:6] == [
        ["2", "x", "bs1", "R0-1", "R2"],
        ["(2", "stages)", "L0", "L1"],
        ["TP2", "TP1"],
        ["1", "x", "bs1", "R3"],
        ["(1", "stage)", "L0-1"],
        ["TP1"],
    ]
    steps = [line for line in lines if line.startswith(" iteration ")]
    assert len(steps) == 3
    assert re.fullmatch(
        r" iteration        2/       3 \| consumed samples:            6 \| "
        r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: 1\.000000E-02 \| "
        r"global batch size:     3 \| "
        r"lm loss: \d\.\d{6}E[+-]\d\d \| grad norm: \d+\.\d{3} \| number of skipped iterations:   0 \| "
        r"number of nan iterations:   0 \| strategy: TP2>TP1\+TP1 \| tokens/s: \d+ \| bubble: \d+\.\d% \| "
        r"data wait \(ms\): \d+\.\d \| compute TFLOP/s: [\d.e-]+ to [\d.e-]+, slowest rank [0-3] \|",
        steps[1],
    )
    summary = shown[shown.index(steps[-1]) :]
    assert re.search(r"loss, first and last step +│ \d\.\d{4} -> \d\.\d{4} ", summary)
    for part in ("tokens/s", "% compute", "% communication", "% bubble", "% other", "3 in "):
        assert part in summary
    assert summary.endswith(f"\nfiles: {Path(recipe).parent / 'run' / 'metrics.jsonl'}\n")


def test_tables_fit_80_columns_when_piped(shown: str) -> None:
    long = (" iteration ", "files: ", "kernels: ", "  passed over: ", "no checkpoint in ", "saved iteration ")
    tables = [line for line in shown.splitlines() if not line.startswith(long)]
    assert max(map(len, tables)) <= 80


def test_metrics_have_one_line_per_step_with_the_promised_fields(shown: str, recipe: str) -> None:
    found = metrics(Path(recipe).parent / "run")
    assert [line["iteration"] for line in found] == [1, 2, 3]
    rates = [line.pop("rank_tflops", {}) for line in found]
    assert [set(own) for own in rates] == [set(), set("0123"), set("0123")], "told a step later"
    assert all(0 < rate < 10 for own in rates for rate in own.values())
    assert all(set(line) == FIELDS for line in found)
    assert all(math.isfinite(value) for line in found for value in line.values())
    assert found[0]["loss"] == pytest.approx(math.log(257), abs=0.1)
    assert found[0]["loss"] > found[1]["loss"] > found[2]["loss"]
    assert {line["lr"] for line in found} == {0.01}
    assert all(0 < line["valid_tokens"] <= 3 * 64 for line in found)
    for line in found:
        assert line["tokens_per_second"] == pytest.approx(line["valid_tokens"] / line["step_seconds"])


def test_a_launcher_gives_the_same_losses(shown: str, recipe: str, tmp_path: Path) -> None:
    launcher = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "hetero_megatron.train",
    )
    with ended_with(started(*launcher, recipe, f"output={tmp_path}")) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.count("micro-batches") == 1, "one rank prints"
    losses = [[line["loss"] for line in metrics(run)] for run in (Path(recipe).parent / "run", tmp_path)]
    assert losses[0] == losses[1]


def test_ranks_that_a_launcher_starts_again_find_one_another_and_go_on(recipe: str, tmp_path: Path) -> None:
    """Its store still has the addresses of the ranks that are gone."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    pair = '{"dp": 2, "tp": 1, "micro_batches": 2}'
    keys = (
        f"strategy={pair}",
        "training.global_batch_size=4",
        "training.train_iters=600",
        "checkpoint.interval=50",
    )
    command = (*launcher, "-m", "hetero_megatron.train", recipe, *keys, f"output={tmp_path}")
    with ended_with(started(*command)) as process:
        while not [*tmp_path.glob("iter_*/complete.json")]:
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [line["iteration"] for line in metrics(tmp_path)] == [*range(1, 601)]


@pytest.mark.usefixtures("unstarted")
def test_a_launcher_with_another_number_of_processes_is_refused(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert train.main([recipe, f"output={tmp_path}"]) == 2
    told = f"{recipe}: 2 processes were started, the strategy has 4 ranks; start one per rank"
    assert capsys.readouterr() == ("", f"error: {told}\n")
    assert refusal("pretrain", recipe, f"output={tmp_path}") == told


def test_a_killed_rank_ends_the_run_within_seconds_and_leaves_no_process(recipe: str, tmp_path: Path) -> None:
    endless = ("training.train_iters=1000000", "training.log_interval=1000000", f"output={tmp_path}")
    with ended_with(started("hetero_megatron", "pretrain", recipe, *endless)) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(" iteration "):
            assert process.poll() is None
        ranks = children(process.pid)
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 10
    assert process.returncode == 128 + signal.SIGKILL
    assert "error: rank 2 was killed by SIGKILL" in err
    assert "Traceback" not in err, "that a peer is gone is no defect of the others"
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # Case O-06: keys and types.
        (["training.gradient_cliping=1"], "training.gradient_cliping: unknown key; did you mean clip_grad?"),
        ([f"{FIRST}.tp_siz=2"], f"{PIPELINES}[0].stages[0].tp_siz: unknown key; did you mean tp?"),
        ([f'{FIRST}.tp="2"'], '.stages[0].tp: "2" is text, a whole number is needed'),
        (
            [f"{PIPELINES}.0.micro_batches=2.5"],
            "[0].micro_batches: 2.5 is a fractional number, a whole number",
        ),
        (
            ["extra.a=1"],
            "extra: unknown key; known here: checkpoint, cluster, data, elastic, evaluation, kernels, logging, ",
        ),
        (["training.hidden_size=3"], "training.hidden_size: unknown key here; hidden_size belongs to model"),
        (["model=llama_9b"], "model.preset: there is no model 'llama_9b'; did you mean llama_7b?"),
        # Case O-02, a to e: doubled, missing, beyond the model, out of order, missing in the second pipeline.
        ([f"{FIRST}.layers=0-1"], "pipeline 0: layer 1 is doubled: in stage 0 and in stage 1"),
        ([f"{FIRST}.layers=0", f"{SECOND}.layers="], "pipeline 0: layer 1 is missing"),
        ([f"{SECOND}.layers=1-2"], "pipeline 0 stage 1: layer 2 is beyond the model, which has layers 0-1"),
        (
            [f"{FIRST}.layers=1", f"{SECOND}.layers=0"],
            "pipeline 0 stage 1: layer 0 is out of order: stage 0 already ends at 1",
        ),
        ([f"{OTHER}.layers=0"], "pipeline 1: layer 1 is missing"),
        # Case O-04: an empty stage in the middle.
        (
            [
                f"{PIPELINES}.0.stages=[{{ranks: 0, layers: 0}}, {{ranks: 1}}, {{ranks: 2, layers: 1}}]",
            ],
            "pipeline 0 stage 1 is an empty stage between others: only the first or last may hold no layer",
        ),
        # Case O-03, a to e.
        ([f"{SECOND}.ranks=1"], "rank 1 is used twice: in pipeline 0 stage 0 and in pipeline 0 stage 1"),
        ([f"{OTHER}.ranks=2"], "rank 2 is used twice: in pipeline 0 stage 1 and in pipeline 1 stage 0"),
        (
            [f"{OTHER}.ranks=7", "cluster.cpu={nodes: 1, devices_per_node: 4}"],
            "rank 7 of pipeline 1 stage 0 is not in the cluster, which has 4 ranks (0 to 3)",
        ),
        (
            ["cluster.cpu={nodes: 1, devices_per_node: 5}"],
            "rank 4 is in no pipeline (left over: [4]); use it, or list it under strategy.idle_ranks",
        ),
        (
            [f"{FIRST}.ranks=[0]", f"{FIRST}.tp=2", "strategy.idle_ranks=1"],
            "pipeline 0 stage 0: tp 2 x cp 1 needs 2 ranks, but rank list [0] has 1",
        ),
        # Batches, data, devices, folders.
        (
            ["training.global_batch_size=4"],
            "global_batch_size 4 does not fit: the pipelines take at most 2 x 1 + 1 x 1 = 3 rows a step",
        ),
        (
            ["training.global_batch_size=2"],
            "leaves micro-batches empty: the pipelines run 3 micro-batches a step",
        ),
        (["data=/nowhere"], "data.folder: /nowhere does not exist; a folder has a document in each file"),
        (
            ["data.files=[/nowhere/a]"],
            "data: source /nowhere/a does not exist",
        ),
        (
            ["output=/dev/null/run"],
            "output.folder: /dev/null/run is no folder that can be written to: Not a dir",
        ),
        (["output=/dev/null"], "output.folder: /dev/null is no folder that can be written to: File exists"),
        (["training.lr"], "override 'training.lr': write path=value, for example training.lr=1e-4"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    recipe: str, changes: list[str], told: str
) -> None:
    message = refusal("pretrain", recipe, *changes)
    assert message.startswith(f"{recipe}: ")
    assert told in message


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SMALL[: SMALL.index("1}]}")], "line 5: "),
        (SMALL[: SMALL.index("1}]}")], "; is the file cut off?"),
        (SMALL[: SMALL.index("training")], "training: missing; it has no default"),
        (SMALL.replace("strategy:\n", "strategy:\n\tzero: 0\n"), "cannot start any token"),
        (SMALL.replace("strategy:\n", "strategy:\n\tzero: 0\n"), "; indent with spaces"),
        (SMALL.replace("{micro_batches: 2", "[\n   {micro_batches: 2"), "line 7: "),
        (SMALL.replace("{micro_batches: 2", "[\n   {micro_batches: 2"), "that began in line 5)"),
        (
            "",
            "is empty; it needs the sections model, strategy, training, and may have cluster, data, kernels, evaluation, ",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "damaged.yaml"
    path.write_text(text)
    message = refusal("pretrain", str(path))
    assert str(path) in message
    assert told in message


@pytest.mark.usefixtures("unstarted")
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert refusal("pretrain", str(missing)) == f"recipe {missing} cannot be read: No such file or directory"
    assert refusal("pretrain", str(tmp_path)) == f"recipe {tmp_path} cannot be read: Is a directory"


@pytest.mark.usefixtures("unstarted")
def test_a_recipe_for_gpus_is_refused_where_there_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = refusal("pretrain", C2, f"output={tmp_path}")
    assert message.startswith(f"{C2}: cluster: the recipe is for h20 devices and this machine has no GPU")
    assert message.endswith("and a recipe without `cluster` runs on this machine's CPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert refusal("pretrain", C2, f"output={tmp_path}") == (
        f"{C2}: 31 ranks on this machine need a GPU each, and it has 8; "
        "start the ranks of several machines with torchrun"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "30", "LOCAL_RANK": "6", "WORLD_SIZE": "31"}.items():
        monkeypatch.setenv(name, value)
    assert "7 ranks on this machine need a GPU each, and it has 2" in refusal(
        "pretrain", C2, f"output={tmp_path}"
    )


@pytest.mark.usefixtures("unstarted")
def test_the_module_for_launchers_refuses_in_the_same_words(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([recipe, "training.learning_rate=1"]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: {recipe}: training.learning_rate: unknown key; did you mean lr?\n",
    )
    for arguments in ([], ["--help"]):
        assert train.main(arguments) == 2
        assert "usage: python -m hetero_megatron.train RECIPE [KEY=VALUE ...]" in capsys.readouterr().err


def test_the_untouched_recipe_is_ready_to_run(recipe: str) -> None:
    run = train.prepare(train.load_recipe(recipe))
    assert run.program.strategy.ranks == (0, 1, 2, 3)
