"""`plan --lengths`: a set of strategies as table, JSON, YAML that a recipe takes, and picture (paper Figure 18)."""

import json
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.cli.plan_lengths import read_lengths, write
from hetero_megatron.data.document_dispatch import DispatchReport
from hetero_megatron.errors import PlannerError, RecipeError
from hetero_megatron.planner.chooser import Candidate, Choice, NamedStrategy
from hetero_megatron.planner.length_sample import LengthSample
from hetero_megatron.planner.mixed_picture import draw_mixed, short
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Stage, Strategy

RECIPE = """model: llama_7b
cluster: {h20: {nodes: 1}}
strategy: auto
data: {packing: documents}
training: {train_iters: 10, global_batch_size: 8, seq_length: 16384, lr: 1e-4, precision: bf16}
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    recipe, lengths = tmp_path / "recipe.yaml", tmp_path / "lengths.npz"
    recipe.write_text(RECIPE + f"output: {tmp_path / 'run'}\n")
    random = np.random.RandomState(0)
    np.savez(lengths, lengths=np.ceil(random.lognormal(5.9, 1.4, 4000)).astype(np.int64))
    return str(recipe), str(lengths)


def test_a_set_of_strategies_is_printed_written_and_drawn(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, picture = tmp_path / "strategy.yaml", tmp_path / "plan.png"
    arguments = ["plan", files[0], "--lengths", files[1], "-o", str(written), "--png", str(picture)]
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert "strategies for documents of up to 16K tokens, 131,072 tokens a step" in out
    assert "predicted mean step:" in out
    for told in (
        "packed: ",
        "varlen: ",
        "hotspa: ",
        "our gain ",
        "as HotSPa plans: intervals of lengths in turn",
    ):
        assert told in out
    assert picture.stat().st_size > 20_000
    text = Path(files[0]).read_text().replace("strategy: auto\n", written.read_text())
    taken = tmp_path / "taken.yaml"
    taken.write_text(text)
    named = load_recipe(taken).make_strategies()
    assert run(*arguments[:4], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["strategies"]] == [each.name for each in named]
    assert found["floor_seconds"] < found["step_seconds"] < found["homogeneous"]["step_seconds"]
    assert set(found["baselines"]) == {"packed", "varlen", "hotspa"}
    for other in found["baselines"].values():
        assert other["gain"] > 0
        assert other["strategy"].partition("DP")[1]
        assert other["limits"]
    assert sum(each["steps"] for each in found["strategies"]) == len(found["steps"]) == 40


def test_lengths_come_from_many_kinds_of_files_or_the_recipes_data(
    files: tuple[str, str], tmp_path: Path
) -> None:
    recipe = load_recipe(files[0])
    text, array = tmp_path / "lengths.txt", tmp_path / "lengths.npy"
    text.write_text("3\n5 7\n")
    np.save(array, np.array([3, 5, 7]))
    assert read_lengths(str(text), recipe).tolist() == read_lengths(str(array), recipe).tolist() == [3, 5, 7]
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("abcd")
    own = load_recipe(files[0], [f"data.folder={folder}"])
    assert read_lengths("data", own).tolist() == [5]


def test_what_holds_no_lengths_is_refused(files: tuple[str, str], tmp_path: Path) -> None:
    recipe = load_recipe(files[0])
    text, other, square = tmp_path / "a.txt", tmp_path / "a.npz", tmp_path / "a.npy"
    text.write_text("x")
    np.savez(other, sizes=np.array([3]))
    np.save(square, np.zeros((2, 2)))
    for source, message in (
        (tmp_path / "none.npz", "--lengths: .*none.npz: No such file"),
        (text, "holds no whole numbers: invalid literal"),
        (other, r"has arrays \['sizes'\], and none named lengths"),
        (square, "holds float64 of 2 dimensions; lengths are a row of whole numbers"),
    ):
        with pytest.raises(RecipeError, match=message):
            read_lengths(str(source), recipe)
    stream = tmp_path / "s.jsonl"
    stream.write_text('{"text": "ab"}\n')
    own = load_recipe(files[0], [f"data.sources=[{{path: {stream}, stream: true}}]"])
    with pytest.raises(
        RecipeError, match="the lengths of a stream's documents are not known; prepare the data"
    ):
        read_lengths("data", own)


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    sample = LengthSample((np.array([3, 5]),), 16384, 20_000)
    report = DispatchReport(8, 0, (1.0,), 1.0, 1.0)
    choice = Choice(0, Candidate((((0, 1),),), 1.0, report), (1.0,), 0.0)
    named = [NamedStrategy("A", Strategy((Pipeline(1, 1, (Stage((0,), (0, 0)),)),)), 64)]
    with pytest.raises(PlannerError, match="cannot be written: .*No such file"):
        draw_mixed(sample, named, [choice], [("floor", 0.5)], tmp_path / "no" / "x.png")
    with pytest.raises(RecipeError, match="-o: .*x.yaml cannot be written: No such file"):
        write("text", tmp_path / "no" / "x.yaml")


def test_sizes_are_short_in_tables_and_pictures() -> None:
    assert [short(each) for each in (512, 16384, 18944)] == ["512", "16K", "18.5K"]
