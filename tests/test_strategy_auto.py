"""`strategy: auto` in a run: the planner's strategy, by published figures or by a profile, and what is said of it."""

from pathlib import Path

import pytest

from hetero_megatron.errors import RecipeError
from hetero_megatron.planner.profiles import Measurement, Profiles
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.run import prepare

TEXT = """
model: {preset: llama_tiny, num_layers: 4}
cluster: {cpu: {nodes: 1, devices_per_node: 2}}
strategy: auto
training: {train_iters: 2, global_batch_size: 4, seq_length: 64, lr: 1e-3}
output: OUTPUT
"""


def load(folder: Path, *overrides: str) -> Recipe:
    path = folder / "auto.yaml"
    path.write_text(TEXT.replace("OUTPUT", str(folder / "run")))
    return load_recipe(path, overrides)


def profile(folder: Path, tp: float) -> Path:
    """A device whose layers take `tp` times as long on two ranks as on one."""
    units = ("layer", "embedding", "head")
    found = tuple(
        Measurement(
            "cpu", "fp32", unit, phase, degree, 1, tokens, 64, 1e-5 * tokens * (tp if degree == 2 else 1)
        )  # type: ignore[arg-type]
        for unit in units
        for phase in ("forward", "backward")
        for degree in (1, 2)
        for tokens in (64, 256)
    )
    path = folder / "profile.json"
    path.write_text(Profiles(measurements=found).to_json())
    return path


def test_a_run_says_what_the_planner_made_and_by_which_times(tmp_path: Path) -> None:
    (said,) = [text for text in prepare(load(tmp_path)).notices if text.startswith("strategy: auto:")]
    assert "s a step predicted by published figures (`profile` measures this machine)" in said
    assert "above the bound of these devices" in said
    assert "the best homogeneous strategy:" in said


def test_a_profile_decides_where_the_recipe_names_one(tmp_path: Path) -> None:
    path = profile(tmp_path, 10.0)
    run = prepare(load(tmp_path, f"planning.profile={path}"))
    assert any(f"predicted by the times of {path}" in text for text in run.notices)
    assert all(stage.tp == 1 for pipeline in run.program.strategy.pipelines for stage in pipeline.stages)
    half = prepare(load(tmp_path, f"planning.profile={profile(tmp_path, 0.1)}"))
    assert [stage.tp for pipeline in half.program.strategy.pipelines for stage in pipeline.stages] == [2]


def test_a_profile_that_is_not_there_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"planning\.profile: nowhere.json: No such file"):
        load(tmp_path, "planning.profile=nowhere.json")


def test_a_written_strategy_is_not_called_a_plan(tmp_path: Path) -> None:
    run = prepare(load(tmp_path, "strategy={dp: 2, micro_batches: 2}"))
    assert not any("auto" in text for text in run.notices)
