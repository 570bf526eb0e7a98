"""`plan` on the command line, and `strategy: auto` in a recipe."""

import json
from pathlib import Path

import pytest

from hetero_megatron.errors import RecipeError
from hetero_megatron.recipe import load_recipe
from tests.cli.commands import SMALL, refusal, run

MODEL = "model: {preset: llama_tiny, num_layers: 4}\n"
CLUSTER = "cluster: {cpu: {nodes: 1, devices_per_node: 4}}\n"
TRAINING = "training: {train_iters: 3, global_batch_size: 6, seq_length: 64, lr: 1e-2}\n"


def written(path: Path, *parts: str) -> str:
    path.write_text("".join(parts) + f"output: {path.parent / 'run'}\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def auto(tmp_path: Path) -> str:
    return written(tmp_path / "auto.yaml", MODEL, CLUSTER, "strategy: auto\n", TRAINING)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return written(tmp_path / "small.yaml", SMALL)


def test_json_has_the_plan_its_bound_and_what_it_is_compared_with(small: str) -> None:
    ended = run("plan", small, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert {
        "step_seconds",
        "bound_seconds",
        "gap",
        "plan_seconds",
        "strategy",
        "memory_bytes",
    } <= found.keys()
    assert 0 < found["bound_seconds"] <= found["step_seconds"]
    assert found["gap"] == pytest.approx(found["step_seconds"] / found["bound_seconds"] - 1)
    assert found["homogeneous"]["step_seconds"] >= found["step_seconds"]
    assert found["given"]["step_seconds"] >= found["step_seconds"]
    assert found["given"]["fits"] is True
    assert set(found["baselines"]) == {"homogeneous", "hexiscale", "oobleck", "hotspa"}
    for other in found["baselines"].values():
        assert other["limits"]
        assert other["gain"] is None or other["gain"] >= 0
    assert all(int(rank) in range(4) and need > 0 for rank, need in found["memory_bytes"].items())
    assert "confirmed by highs" in found["method"]


def test_tables_name_the_plan_the_others_and_what_memory_it_needs(small: str) -> None:
    ended = run("plan", small, "--explain")
    assert ended.code == 0, ended.err
    for told in (
        "strategy",
        "predicted; bound",
        "planned",
        "homogeneous",
        "our gain",
        "hexiscale: as HexiScale plans, layers and batches by memory or tuned",
        "oobleck: as Oobleck plans: templates of whole nodes",
        "hotspa: as HotSPa plans: one homogeneous",
        "given",
        "memory per rank",
        "pipeline 0: ",
    ):
        assert told in ended.out


def test_what_o_writes_a_recipe_takes(small: str, tmp_path: Path) -> None:
    section = tmp_path / "strategy.yaml"
    ended = run("plan", small, "-o", str(section), "--json")
    assert ended.code == 0, ended.err
    text = section.read_text(encoding="utf-8")
    assert text.startswith("# made by `hetero-megatron plan`: ")
    again = written(
        tmp_path / "again.yaml", SMALL[: SMALL.index("strategy:")], text, SMALL[SMALL.index("training:") :]
    )
    recipe = load_recipe(again, ["cluster={cpu: {nodes: 1, devices_per_node: 4}}"])
    told = json.loads(run("plan", again, "--json", "cluster={cpu: {nodes: 1, devices_per_node: 4}}").out)
    assert told["strategy"] == told["given"]["strategy"]
    assert recipe.make_strategy().ranks


def test_auto_is_the_plan_and_is_planned_once(auto: str) -> None:
    recipe = load_recipe(auto)
    strategy = recipe.make_strategy()
    strategy.check(recipe.make_config().facts, recipe.make_cluster().ranks)
    assert recipe.make_strategy() is strategy
    told = json.loads(run("plan", auto, "--json").out)
    assert told["given"] is None
    pipelines = told["strategy"]["pipelines"]
    assert [p["micro_batches"] for p in pipelines] == [p.micro_batches for p in strategy.pipelines]


def test_auto_can_be_explained_and_simulated(auto: str) -> None:
    assert run("explain", auto, "--json").code == 0
    assert run("simulate", auto, "--json").code == 0


def test_auto_needs_devices_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "no.yaml", MODEL, "strategy: auto\n", TRAINING)
    assert "cluster: missing; with strategy auto the devices come first" in refusal("plan", path)
    path = written(tmp_path / "more.yaml", MODEL, CLUSTER, "strategy: {auto: true, zero: 1}\n", TRAINING)
    assert "auto leaves everything to the planner; drop zero, or drop auto" in refusal("plan", path)
    path = written(tmp_path / "other.yaml", MODEL, CLUSTER, "strategy: best\n", TRAINING)
    with pytest.raises(RecipeError, match='"best" is no strategy; write auto, or a mapping with pipelines'):
        load_recipe(path)


def test_a_loss_is_planned_for(small: str) -> None:
    arguments = ("plan", small, "--zero", "0", "--pipelines", "2")
    told = json.loads(run(*arguments, "--json", "--after-loss", "3").out)
    after = told["after_change"]
    assert after["lost"] == [3]
    assert after["step_seconds"] > 0
    assert "3" not in after["memory_bytes"]
    assert "after losing 3: step " in run(*arguments, "--after-loss", "3").out
    assert "--after-loss: " in refusal("plan", small, "--after-loss", "x")


def test_a_node_that_joins_is_planned_for(auto: str) -> None:
    told = json.loads(run("plan", auto, "--json", "--after-join", "cpu:2").out)
    assert told["after_change"]["joined"] == [4, 5]
    assert "after joining 4-5: step " in run("plan", auto, "--after-join", "cpu:2").out
    assert "--after-join: 'cpu' is no node; write a kind and a count" in refusal(
        "plan", auto, "--after-join", "cpu"
    )
    assert "rank 4 is a 'h20'" in refusal("plan", auto, "--after-join", "h20:1")


def test_a_picture_is_drawn(small: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("plan", small, "--png", str(tmp_path / "plan.png")).code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "--png: " in refusal("plan", small, "--json", "--png", str(tmp_path / "no" / "plan.png"))


def test_files_that_cannot_be_written_and_unknown_solvers_are_refused(small: str, tmp_path: Path) -> None:
    assert "-o: " in refusal("plan", small, "-o", str(tmp_path / "no" / "s.yaml"))
    assert "solver 'gurobi' is unknown" in refusal("plan", small, "--solver", "gurobi")


def test_a_missing_solver_is_said_and_the_plan_printed(small: str, tmp_path: Path) -> None:
    ended = run("plan", small, "--solver", str(tmp_path / "cbc"))
    assert ended.code == 0
    assert "there is no such file" in ended.out
    assert "The own exact search made this plan" in ended.out
