"""`plot`: a run's picture from what its folder holds, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.plot import strategies_of
from hetero_megatron.run_picture import ShownStrategy
from tests.cli.commands import refusal, run

PNG = b"\x89PNG"


def step(iteration: int, number: int | None = None, **others: Any) -> dict[str, Any]:
    found = {
        "iteration": iteration,
        "first_sample": 4 * iteration - 4,
        "consumed_samples": 4 * iteration,
        "step_seconds": 0.5,
        **others,
    }
    if number is None:
        return found
    lengths = {"64": [3, 150], "1024": [1, 900]}
    several = {"strategy": "ab"[number], "strategy_number": number, "switch_seconds": 0.1 * number}
    return found | {"longest_document": 900, "lengths": lengths} | several


def folder_of(folder: Path, steps: list[dict[str, Any]], **facts: Any) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    if facts:
        (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_strategies_are_those_of_the_run_with_what_they_take() -> None:
    several = [{"name": "a", "max_length": 512}, {"name": "b"}]
    facts = {"recipe": {"strategy": {"several": several}}, "strategy": "a TP1+TP1; b TP2"}
    assert strategies_of(facts, []) == [ShownStrategy("a", "TP1+TP1", 512), ShownStrategy("b", "TP2")]
    assert strategies_of({}, [step(1, 1)]) == [ShownStrategy("", ""), ShownStrategy("b", "")]
    assert strategies_of({"strategy": "TP2>TP1"}, [step(1)]) == [ShownStrategy("", "TP2>TP1")]


@pytest.mark.parametrize("numbers", [(0, 1, 1), (None, None)])
def test_a_run_is_drawn_with_lengths_or_without(tmp_path: Path, numbers: tuple[int | None, ...]) -> None:
    pytest.importorskip("matplotlib")
    folder = folder_of(tmp_path, [step(n + 1, number) for n, number in enumerate(numbers)], strategy="TP1")
    ended = run("plot", str(folder), "-o", str(tmp_path / "run.png"))
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    told = "metrics.jsonl has no steps of a run; give the folder of one that has trained"
    assert refusal("plot", str(tmp_path), "-o", "a.png") == f"{tmp_path}/{told}"
    (tmp_path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read: Is a directory" in refusal("plot", str(tmp_path), "-o", "a.png")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = folder_of(tmp_path, [step(1)])
    assert "-o: /nowhere/a.png cannot be written: " in refusal("plot", str(folder), "-o", "/nowhere/a.png")


def test_without_matplotlib_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = "a picture needs matplotlib, which is not installed; pip install hetero-megatron[plots]"
    assert refusal("plot", str(folder_of(tmp_path, [step(1)])), "-o", "a.png") == told
