"""The recipes for pretraining on clusters, and the small ones: they load, fit their devices, and open no corpus."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.data.samples import DataPosition
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.run import prepare
from hetero_megatron.runtime.learning_rate import learning_rate
from tests.cli.commands import run

RECIPES = Path(__file__).parent.parent / "recipes"
NAMES = tuple(sorted(path.stem for path in (RECIPES / "pretrain").glob("*.yaml")))
PAPER = {
    "llama_32b_16h800_32h20": "table9_32b_16h800_32h20",
    "llama_70b_16h800_32h20": "table9_70b_16h800_32h20",
    "llama_32b_mixed_16k_32h20": "table15_b",
    "llama_32b_mixed_32k_32h20": "table15_a",
}
MOST_OF_A_DEVICE = 0.93
"""The driver, communication libraries and the allocator's fragmentation need the rest."""


@cache
def recipe(name: str) -> Recipe:
    return load_recipe(RECIPES / "pretrain" / f"{name}.yaml")


def test_there_are_recipes_for_every_size_alike_and_mixed() -> None:
    assert {"llama_7b_8h100", "llama_32b_32h100", "llama_70b_64h100", *PAPER} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pretraining_recipe_has_all_that_a_long_run_needs(name: str) -> None:
    found = recipe(name)
    assert found.evaluation is not None
    sources = found.data.sources or ()
    held_out = found.evaluation.data.sources or ()
    assert {source.path for source in sources}.isdisjoint({source.path for source in held_out})
    assert (sources, held_out) != ((), ())
    assert found.data.tokenizer == found.evaluation.data.tokenizer != "byte"
    assert found.checkpoint.interval
    assert found.output.folder == f"runs/{name}"
    settings = found.training.optimizer_settings(found.training.train_iters or 0)
    assert learning_rate(settings, settings.train_iters) == settings.min_lr > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_pretraining_recipe_fits_its_devices_and_opens_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("explain", str(RECIPES / "pretrain" / f"{name}.yaml"), "--memory", "--json")
    assert ended.code == 0, ended.err
    found: Any = json.loads(ended.out)
    assert found["fits"]
    for rank in found["memory"]:
        assert rank["need"] <= MOST_OF_A_DEVICE * rank["capacity"], rank
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_for_mixed_devices_or_lengths_has_the_paper_s_stages(name: str) -> None:
    paper = load_recipe(RECIPES / "paper" / f"{PAPER[name]}.yaml").make_strategy()

    def stages(strategy: Any) -> list[Any]:
        return [[(stage.ranks, stage.layers, stage.tp) for stage in p.stages] for p in strategy.pipelines]

    mine, length = recipe(name).make_strategy(), recipe(name).training.seq_length
    assert stages(mine) == stages(paper)
    shares = {
        a.micro_batches * a.tokens(length) / b.micro_batches
        for a, b in zip(mine.pipelines, paper.pipelines, strict=True)
    }
    assert len(shares) == 1, "pipelines take the paper's shares of the work"
    assert mine.zero == paper.zero == 1


@pytest.mark.parametrize("name", NAMES)
def test_documents_stay_whole_where_lengths_are_mixed(name: str) -> None:
    found = recipe(name)
    packing = "documents" if "mixed" in name else "rows"
    assert found.data.packing == packing
    assert found.evaluation is not None
    assert found.evaluation.data.packing == packing


def test_the_small_recipe_of_mixed_lengths_is_for_this_machine() -> None:
    found = load_recipe(RECIPES / "mixed_length_cpu.yaml")
    assert (found.cluster, found.data.packing) == (None, "documents")
    named = found.make_strategies()
    assert [(each.name, each.max_length) for each in named] == [("long", None), ("short", 2560)]
    assert {each.strategy.ranks for each in named} == {(0, 1, 2, 3)}


def test_the_small_recipe_of_mixed_lengths_switches(tmp_path: Path) -> None:
    run = prepare(load_recipe(RECIPES / "mixed_length_cpu.yaml", [f"output={tmp_path}"]))
    steps, packing, position, found = run.data.steps, run.data.packing, DataPosition(), []
    for _ in range(32):
        step = steps.at(position)
        assert step is not None
        found.append(step)
        position = steps.after(step)
    packing.decide(found)
    taken = [packing.share(step).strategy for step in found]
    assert min(taken.count(0), taken.count(1)) > 4, "both strategies train"
    assert sum(a != b for a, b in pairwise(taken)) > 4
