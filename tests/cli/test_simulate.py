"""`simulate` and `profile` on the command line."""

import json
import sys
from pathlib import Path

import pytest

from hetero_megatron.planner.profiles import Profiles
from tests.cli.commands import C2, SMALL, refusal, run


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + f"output: {tmp_path / 'run'}\n", encoding="utf-8")
    return str(path)


def test_json_has_a_step_a_bound_and_where_each_ranks_time_goes(small: str) -> None:
    ended = run("simulate", small, "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert list(found) == ["step_seconds", "bound_seconds", "ranks"]
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    for each in found["ranks"]:
        assert each["busy"] + each["comm"] + each["bubble"] == pytest.approx(found["step_seconds"])
        assert each["memory_peak_bytes"] > 0
    assert 0 < found["bound_seconds"] < found["step_seconds"]


def test_the_table_shows_each_stage_and_says_where_times_come_from(small: str) -> None:
    ended = run("simulate", small)
    assert ended.code == 0
    assert ended.out.startswith("predicted step: ")
    assert "above the bound" in ended.out
    rows = [line.split() for line in ended.out.splitlines() if "cpu" in line]
    assert [row[:3] for row in rows] == [["0", "0", "0-1"], ["0", "1", "2"], ["1", "0", "3"]]
    assert "published figures" in ended.out


def test_a_trace_and_a_picture_are_written(small: str, tmp_path: Path) -> None:
    trace, png = tmp_path / "trace.json", tmp_path / "step.png"
    assert run("simulate", small, "--trace", str(trace), "--png", str(png)).code == 0
    assert len(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]) > 20
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_plan_of_the_paper_is_simulated_with_changes() -> None:
    sums = [
        json.loads(run("simulate", C2, "--json", "model.num_layers=60", f"training.seq_length={length}").out)
        for length in (1024, 4096)
    ]
    assert sums[0]["step_seconds"] < 0.3 * sums[1]["step_seconds"]


def test_a_profile_replaces_published_figures(small: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = Profiles(model={"hidden_size": 32}, fixed_seconds={"cpu": 100.0})
    path.write_text(profile.to_json(), encoding="utf-8")
    ended = run("simulate", small, "--json", "--profile", str(path))
    assert json.loads(ended.out)["step_seconds"] > 100


def test_profiles_that_do_not_fit_are_refused(small: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert "--profile: " in refusal("simulate", small, "--profile", str(path))
    path.write_text("{", encoding="utf-8")
    assert "line 1 is no JSON" in refusal("simulate", small, "--profile", str(path))
    path.write_bytes(b"\xff")
    assert "is not UTF-8 text: byte 0 is invalid" in refusal("simulate", small, "--profile", str(path))
    path.write_text(Profiles(model={"hidden_size": 48}).to_json(), encoding="utf-8")
    message = refusal("simulate", small, "--profile", str(path))
    assert "measured with hidden_size 48, the recipe's model has 32; profile this recipe's model" in message


def test_files_that_cannot_be_written_are_refused(small: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "file.json")
    assert "--trace: " in refusal("simulate", small, "--trace", nowhere)
    assert "cannot be written" in refusal("simulate", small, "--png", str(tmp_path / "no" / "step.png"))
    assert "cannot be written" in refusal("simulate", small, "--png", str(tmp_path / "step.nonsense"))
    assert "--output: " in refusal("profile", small, "-o", nowhere)


def test_a_picture_without_matplotlib_is_refused(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "a picture needs matplotlib" in refusal("simulate", small, "--png", str(tmp_path / "step.png"))


def test_degrees_that_cannot_be_measured_are_refused(small: str) -> None:
    assert "--tp: " in refusal("profile", small, "--tp", "two")
    assert "4 attention heads" in refusal("profile", small, "--tp", "3")
    assert "cp 0 are degrees; 1 or more is right" in refusal("profile", small, "--cp", "0")


def test_a_measured_profile_is_written_shown_and_read(small: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ended = run("profile", small, "-o", str(path), "--json", "--tp", "1", "--rounds", "1")
    assert ended.code == 0, ended
    assert json.loads(ended.out) == json.loads(path.read_text(encoding="utf-8"))
    shown = run("simulate", small, "--profile", str(path))
    assert "published figures" not in shown.out
    assert "warning: cpu: TP2 was not measured; its layer is scaled from TP1" in shown.out
