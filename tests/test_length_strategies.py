"""A recipe's list of strategies: read, checked, written and chosen from (case O-43; paper Tables 15, 16)."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.steps import StepSamples
from hetero_megatron.data.strategy_packing import StrategyPacking
from hetero_megatron.errors import RecipeError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.length_strategies import make_chooser, places_of, strategy_packing
from hetero_megatron.models.llama import Llama
from hetero_megatron.planner.chooser import StepChooser
from hetero_megatron.planner.profiles import PHASES, UNITS, Measurement, Profiles
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.run import build_programs, prepare
from hetero_megatron.strategy_yaml import strategies_yaml
from tests.data.memory import MemoryDocuments

HEAD = "model: {preset: llama_tiny, num_layers: 4}\n"
LIST = """strategy:
- name: long
  pipelines:
  - {micro_batches: 2, stages: [{ranks: 0-3, layers: 0-3}]}
- name: short
  max_length: 512
  dp: 2
  tp: 2
  micro_batches: 2
"""
TAIL = """data: {packing: documents}
training: {train_iters: 5, global_batch_size: 4, seq_length: 2048, lr: 1e-3}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load(tmp_path, LIST)


def load(folder: Path, strategies: str, *overrides: str) -> Recipe:
    file = folder / "mixed.yaml"
    file.write_text(HEAD + strategies + TAIL + f"output: {folder / 'run'}\n")
    return load_recipe(file, overrides)


def test_a_list_of_strategies_is_read_and_chosen_from_by_length(recipe: Recipe) -> None:
    named = recipe.make_strategies()
    assert [(each.name, each.max_length, len(each.strategy.pipelines)) for each in named] == [
        ("long", None, 1),
        ("short", 512, 2),
    ]
    assert recipe.make_strategy() == named[0].strategy
    assert len(recipe.make_cluster().ranks) == 4
    chooser = make_chooser(recipe)
    assert None not in chooser.choose([512, 511, 30]).seconds
    # 513 filled up to a multiple of 2 is more than 512.
    assert chooser.choose([513, 30]).seconds[1] is None


def test_one_strategy_is_a_list_of_one(tmp_path: Path) -> None:
    found = load(tmp_path, "strategy: {dp: 2, micro_batches: 1}\n").make_strategies()
    assert [each.name for each in found] == ["only"]


def test_a_list_is_written_as_it_is_read(recipe: Recipe, tmp_path: Path) -> None:
    text = strategies_yaml(recipe.make_strategies(), "a comment")
    assert text.startswith("# a comment\nstrategy:\n- name: long\n")
    assert load(tmp_path, text).make_strategies() == recipe.make_strategies()


def test_micro_batch_sizes_of_a_pipeline_are_written_too(tmp_path: Path) -> None:
    text = LIST.replace("{micro_batches: 2,", "{micro_batches: 2, max_tokens: 2048,")
    first = load(tmp_path, text)
    again = load(tmp_path, strategies_yaml(first.make_strategies()))
    assert again.make_strategies()[0].strategy.pipelines[0].max_tokens == 2048


def test_a_loader_shares_by_the_chosen_strategy_and_knows_a_ranks_places(recipe: Recipe) -> None:
    samples = DocumentSamples(MemoryDocuments((100, 300, 50, 1900, 20, 20)), 0, 2048)
    packing = strategy_packing(recipe, samples)
    share = packing.share(StepSamples(0, 0, 6))
    assert share.strategy == 0
    assert sorted(unit for own in share.pipelines for batch in own for unit in batch) == [
        (n, 0) for n in range(6)
    ]
    model = Llama(recipe.make_config())
    programs = [
        Program.build(trace(model), each.strategy, model.config.facts, recipe.make_cluster())
        for each in recipe.make_strategies()
    ]
    assert [places_of(programs, rank) for rank in (0, 3)] == [((0, 4), (0, 2)), ((0, 4), (1, 2))]


def test_a_run_is_made_ready_with_a_program_for_each_strategy_on_one_layout_of_states(recipe: Recipe) -> None:
    run = prepare(recipe)
    assert list(run.programs) == ["long", "short"]
    first, second = (program.annotated.states for program in run.programs.values())
    assert first == second
    assert run.program is run.programs["long"]
    assert run.evaluates == "long"


def test_evaluation_takes_the_first_strategy_that_holds_seq_length(tmp_path: Path) -> None:
    short, long = "- name: short" + LIST.split("- name: short")[1], LIST.split("- name: short")[0]
    swapped = "strategy:\n" + short + long.removeprefix("strategy:\n")
    run = prepare(load(tmp_path, swapped, "evaluation={data: {packing: documents}}"))
    assert (list(run.programs), run.evaluates) == (["short", "long"], "long")
    with pytest.raises(
        RecipeError, match="global_batch_size 4 does not fit: the pipelines take at most 2 x 1 = 2"
    ):
        load(tmp_path, swapped, "evaluation={data: {packing: rows}}")


def test_a_profile_is_what_strategies_are_chosen_by(tmp_path: Path) -> None:
    profile = tmp_path / "machine.json"
    config = load(tmp_path, LIST).make_config()
    slow = [
        Measurement("cpu", "fp32", unit, phase, tp, 1, tokens, tokens, 1e-3 * tokens * tp**3)
        for unit in UNITS
        for phase in PHASES
        for tp in (2, 4)
        for tokens in (256, 2048)
    ]
    sizes = {"hidden_size": config.hidden_size, "num_layers": config.num_layers}
    profile.write_text(Profiles(sizes, tuple(slow)).to_json())
    run = prepare(load(tmp_path, LIST, f"planning.profile={profile}"))
    assert isinstance(run.data.packing, StrategyPacking)
    chooser = run.data.packing.chooser
    assert isinstance(chooser, StepChooser)
    assert chooser.costs.profiles.measurements == tuple(slow)
    with pytest.raises(
        RecipeError, match=r"mixed.yaml: planning\.profile: .*nowhere.json: No such file or directory"
    ):
        prepare(load(tmp_path, LIST, "planning.profile=nowhere.json"))


def test_a_kernel_without_a_ring_form_is_refused_whichever_strategy_has_the_ring(tmp_path: Path) -> None:
    text = LIST.replace("dp: 2\n  tp: 2", "dp: 1\n  tp: 2\n  cp: 2")
    with pytest.raises(RecipeError, match="kernels.attention: torch-sdpa has no ring form"):
        prepare(load(tmp_path, text, "kernels.attention=torch-sdpa"))


def test_a_strategy_that_cannot_be_built_is_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    named = recipe.make_strategies()
    few = replace(named[1].strategy, pipelines=named[1].strategy.pipelines[:1], idle_ranks=(2, 3))
    monkeypatch.setattr(Recipe, "make_strategies", lambda self: (named[0], replace(named[1], strategy=few)))
    with pytest.raises(
        StrategyError, match="strategy 'short': rank 2 holds optimizer states, but works in no"
    ):
        build_programs(recipe, Llama(recipe.make_config()))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("name: short", "name: long", "two strategies of the list have the name 'long'; give each its own"),
        (
            "- name: short\n  max",
            "- max",
            "strategy 1 of the list has no name; give it one, such as name: long",
        ),
        (
            "dp: 2",
            "auto: true",
            "auto leaves everything to the planner; drop max_length, micro_batches, name, tp",
        ),
        ("dp: 2", "dp: 1\n  idle_ranks: 2-3", "have ranks 0-3 and 0-1; optimizer states stay where they are"),
        (
            "dp: 2",
            "dp: 2\n  zero: 1",
            "strategies 'long' and 'short' have zero 0 and 1; optimizer states stay",
        ),
        (
            "dp: 2",
            "dp: 2\n  offload_optimizer: true",
            "have offload_optimizer False and True; optimizer states stay where they are",
        ),
        ("layers: 0-3", "layers: 0-2", "strategy: .*layer"),
        ("tp: 2", "tp: 2\n  pp: 5", "strategy.pp: 5 stages for 4 layers"),
        ("dp: 2", "dp: 1", "strategy 'short': rank 2 is in no pipeline"),
        (
            "name: long",
            "name: long\n  max_length: 1024",
            "of training.seq_length 2048 tokens: they hold up to 1024",
        ),
        (
            "max_length: 512",
            "max_lenght: 512",
            r"strategy\[1\]\.max_lenght: unknown key; did you mean max_length\?",
        ),
        (
            "data: {",
            "elastic: {stragglers: propose}\ndata: {",
            "elastic.stragglers: propose plans one strategy for the measured speeds, and the recipe has several; leave",
        ),
        (
            "packing: documents",
            "packing: rows",
            "several strategies are chosen by the lengths of a step's documents",
        ),
    ],
)
def test_a_list_that_does_not_do_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text((HEAD + LIST + TAIL).replace(old, new, 1))
    with pytest.raises(RecipeError, match=text):
        load_recipe(file)


def test_a_schedule_of_a_file_is_refused_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("pipeline,stage,actions\n0,0,F0,B0,F1,B1\n1,0,F0,B0,F1,B1\n")
    text = LIST.replace("dp: 2", f"dp: 2\n  schedule: {tmp_path / 'two.csv'}")
    with pytest.raises(
        RecipeError, match=r"strategy 'short': schedule .*two\.csv is for one number of micro-"
    ):
        load(tmp_path, text)


def test_what_stands_beside_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="zero belongs into the strategies of the list; write it there"):
        load(tmp_path, "strategy: {several: [{name: a, micro_batches: 1}], zero: 1}\n")
