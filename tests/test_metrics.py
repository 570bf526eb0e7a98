"""Every iteration stands in the metrics once, whatever a run went through; TensorBoard and wandb get the same numbers."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.errors import RecipeError, RuntimeFailure
from hetero_megatron.metrics import (
    Metrics,
    StepFacts,
    Turn,
    by_length,
    check_installed,
    kept_lines,
    peak_memory_bytes,
    perplexity,
    run_facts,
    step_values,
)
from hetero_megatron.recipe import load_recipe
from hetero_megatron.runtime.session import Evaluation, StepResult

SECONDS = {"step": 0.5, "compute": 0.3, "communication": 0.1, "bubble": 0.05}
RUN = {"recipe": {"model": "llama_tiny"}, "strategy": "TP2>TP1"}


def result(iteration: int, loss: float = 2.5, skipped: str = "") -> StepResult:
    return StepResult(iteration, loss, 0.25, 1e-3, 1000, skipped, SECONDS)


def facts(iteration: int, **others: Any) -> StepFacts:
    return StepFacts(8 * iteration - 8, 8 * iteration, 1000 * iteration, **others)


def read(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_says_which_strategy_made_a_step_of_how_long_documents() -> None:
    found = step_values(result(3), facts(3, lengths=(3, 4, 5, 100), turn=Turn(1, "short", 0.25)), 1, 1)
    assert found["longest_document"] == 100
    assert found["lengths"] == {"4": [2, 7], "8": [1, 5], "128": [1, 100]}
    assert (found["strategy"], found["strategy_number"], found["switch_seconds"]) == ("short", 1, 0.25)
    assert by_length([1, 2, 1024, 1025]) == {"1": [1, 1], "2": [1, 2], "1024": [1, 1024], "2048": [1, 1025]}


def test_a_line_says_what_the_step_did_and_how_fast() -> None:
    evaluation = Evaluation(math.log(20.0), 500)
    found = step_values(
        result(3),
        facts(3, padding_share=0.02, data_wait_seconds=0.01, evaluation=evaluation, note="hm"),
        10**9,
        4,
    )
    assert found == {
        "iteration": 3,
        "loss": 2.5,
        "grad_norm": 0.25,
        "lr": 1e-3,
        "valid_tokens": 1000,
        "first_sample": 16,
        "consumed_samples": 24,
        "consumed_tokens": 3000,
        "step_seconds": 0.5,
        "compute_seconds": 0.3,
        "communication_seconds": 0.1,
        "bubble_seconds": 0.05,
        "data_wait_seconds": 0.01,
        "tokens_per_second": 2000.0,
        "tflops_per_device": 0.5,
        "padding_share": 0.02,
        "evaluation_loss": math.log(20.0),
        "evaluation_perplexity": pytest.approx(20.0),
        "evaluation_tokens": 500,
        "note": "hm",
    }
    assert step_values(result(3), facts(3, peak_memory_bytes=7), 1, 1)["peak_memory_bytes"] == 7
    assert peak_memory_bytes(torch.device("cpu")) is None


def test_numbers_that_are_not_finite_are_null_and_the_reason_is_told(tmp_path: Path) -> None:
    with Metrics(tmp_path, RUN) as metrics:
        metrics.step(
            result(1, math.nan, "gradient not finite on rank 2"), facts(1, evaluation=Evaluation(math.inf, 1))
        )
    (line,) = read(tmp_path)
    assert (line["loss"], line["evaluation_loss"]) == (None, None)
    assert line["skipped"] == "gradient not finite on rank 2"
    assert line["evaluation_perplexity"] == pytest.approx(math.exp(20))
    assert math.isnan(perplexity(math.nan))


def test_a_resumed_run_has_every_iteration_once(tmp_path: Path) -> None:
    with Metrics(tmp_path, RUN) as metrics:
        for iteration in range(1, 8):
            metrics.step(result(iteration, loss=1.0), facts(iteration))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 8, "lo')  # killed while it wrote
    with Metrics(tmp_path, RUN, resumed_at=5) as metrics:
        for iteration in range(6, 10):
            metrics.step(result(iteration, loss=2.0), facts(iteration))
    assert [(line["iteration"], line["loss"]) for line in read(tmp_path)] == [
        *((iteration, 1.0) for iteration in range(1, 6)),
        *((iteration, 2.0) for iteration in range(6, 10)),
    ]
    assert json.loads((tmp_path / "run.json").read_text()) == {**RUN, "resumed_at": 5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_a_run_that_begins_anew_drops_the_old_metrics(tmp_path: Path) -> None:
    for _ in range(2):
        with Metrics(tmp_path, RUN) as metrics:
            metrics.step(result(1), facts(1))
        assert len(read(tmp_path)) == 1


def test_lines_that_are_no_steps_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        "",
        "[]",
        "3",
        '{"loss": 1}',
        '{"iteration": "2"}',
        '{"iteration": 2, "a": 1}',
        '{"iteration": 1}',
    ]
    path.write_text("\n".join([*lines, '{"iteration": 2, "a": 2}', '{"iteration": 3}']))
    assert kept_lines(path, 2) == ['{"iteration": 1}', '{"iteration": 2, "a": 2}']
    assert kept_lines(tmp_path / "nothing", 2) == []


def test_a_step_is_in_the_file_before_the_next_one_begins(tmp_path: Path) -> None:
    with Metrics(tmp_path, RUN) as metrics:
        metrics.step(result(1), facts(1))
        assert len(read(tmp_path)) == 1


def test_run_facts_name_the_versions() -> None:
    found = run_facts({"a": 1}, "TP2", {"attention": "torch-sdpa"})
    assert found["recipe"] == {"a": 1}
    assert found["kernels"] == {"attention": "torch-sdpa"}
    assert found["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(found)) == found


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFailure, match="metrics cannot be written to .*file: File exists"):
        Metrics(tmp_path / "file", RUN)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_what_a_full_disk_does_not_take_is_written_when_there_is_space(tmp_path: Path) -> None:
    with Metrics(tmp_path, RUN) as metrics:
        metrics.step(result(1), facts(1))
        file, metrics._file = metrics._file, Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115  # closed below
        for number in (2, 3):
            metrics.step(result(number), facts(number))
            assert re.fullmatch(
                r"metrics cannot be written to .*metrics\.jsonl: No space left.*", metrics.trouble
            )
        assert [line["iteration"] for line in read(tmp_path)] == [1]
        metrics._file.close()
        metrics._file = file
        metrics.step(result(4), facts(4))
        assert metrics.trouble == ""
    assert [line["iteration"] for line in read(tmp_path)] == [1, 2, 3, 4]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_gets_the_numbers_under_megatron_s_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Metrics(tmp_path, RUN, tensorboard=True) as metrics:
        for iteration in range(1, 6):
            metrics.step(result(iteration, float(iteration)), facts(iteration))
        metrics.step(result(6, math.nan, "not finite"), facts(6))
    with Metrics(tmp_path, RUN, tensorboard=True, resumed_at=3) as metrics:
        for iteration in (4, 5):
            evaluation = Evaluation(3.0, 10) if iteration == 5 else None
            metrics.step(result(iteration, 10.0 * iteration), facts(iteration, evaluation=evaluation))
    found = scalars(tmp_path)
    assert found["lm loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    assert found["lm loss validation"] == [(5, 3.0)]
    assert found["lm loss validation ppl"] == [(5, math.exp(3))]
    assert {"learning-rate", "grad-norm", "iteration-time", "tokens_per_second", "data_wait_seconds"} <= set(
        found
    )
    assert not {"iteration", "skipped"} & set(found)


# The signatures of wandb's own init, Run.log and Run.finish, as its reference gives them.
STAND_IN = """
import json, os
from pathlib import Path

class Run:
    def __init__(self, id, path):
        self.id, self._path = id, path

    def _tell(self, **what):
        with self._path.open("a") as file:
            print(json.dumps(what), file=file)

    def log(self, data, step=None, commit=None):
        self._tell(data=data, step=step)

    def finish(self, exit_code=None, quiet=None):
        self._tell(exit_code=exit_code)

def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None,
         mode=None, force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None,
         tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None):
    run = Run(id or "made-up-id", Path(dir) / "told.jsonl")
    run._tell(project=project, name=name, id=id, resume=resume, config=config,
              mode=mode or os.environ.get("WANDB_MODE", "online"))
    return run
"""


def test_wandb_gets_the_numbers_and_a_resumed_run_goes_on_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    with Metrics(folder, RUN, wandb="llamas") as metrics:
        metrics.step(result(1), facts(1))

    def interrupted() -> None:
        with Metrics(folder, RUN, wandb="llamas", resumed_at=1) as metrics:
            metrics.step(result(2, math.inf), facts(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    began, one, ended, again, two, failed = [
        json.loads(x) for x in (folder / "told.jsonl").read_text().splitlines()
    ]
    monkeypatch.delitem(sys.modules, "wandb")
    assert (began["project"], began["name"], began["id"], began["mode"]) == ("llamas", "run", None, "offline")
    assert began["config"] == {**RUN, "resumed_at": 0}
    assert (one["step"], one["data"]["lm loss"]) == (1, 2.5)
    assert (again["id"], again["resume"]) == ("made-up-id", "allow")
    assert two["step"] == 2
    assert "lm loss" not in two["data"]
    assert (ended, failed) == ({"exit_code": 0}, {"exit_code": 1})


@pytest.mark.parametrize(("key", "wanted"), [("tensorboard", (True, None)), ("wandb", (False, "llamas"))])
def test_a_package_that_is_missing_is_refused_by_name(
    key: str, wanted: tuple[bool, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # wandb leaves a folder of its own name in the working directory, which is no package.
    (tmp_path / key).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, key, raising=False)
    message = f"logging.{key}: the package {key} is not installed; `pip install {key}`, or leave the key out"
    with pytest.raises(RecipeError, match=message):
        check_installed(*wanted)
    with pytest.raises(RecipeError, match=message):
        Metrics(tmp_path, RUN, tensorboard=wanted[0], wandb=wanted[1])
    check_installed(False, None)


def test_run_facts_of_a_recipe_can_be_written(tmp_path: Path) -> None:
    recipe = load_recipe(Path(__file__).parent.parent / "recipes" / "quickstart.yaml")
    with Metrics(tmp_path, run_facts(recipe.model_dump(mode="json"), "TP2>TP1+TP1", {})):
        found = json.loads((tmp_path / "run.json").read_text())
    assert found["recipe"]["training"]["train_iters"] == 150
    assert found["recipe"]["strategy"]["pipelines"][0]["stages"][0]["ranks"] == [0, 1]
