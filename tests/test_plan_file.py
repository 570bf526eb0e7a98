"""An annotation plan file is accepted wherever a strategy is, and exported from any strategy."""

import dataclasses
from pathlib import Path

import pytest

from hetero_megatron.annotation import Annotation, AnnotationPlan
from hetero_megatron.errors import HeteroError, RecipeError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layout import annotate, read_plan
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, build, het4, stage, strategy

EDGES = strategy(
    (2, 1, [stage("0", None), stage("1-2", "0-3"), stage("3", None)]), (1, 2, [stage("4", "0-3")])
)

INTERLEAVED = strategy(
    (3, 1, [stage("0-1", "0, 2"), stage("2", "1, 3")]), (1, 1, [stage("3", "0-3")]), schedule="interleaved"
)


TIED = dataclasses.replace(T0, tie_word_embeddings=True)


def plan_of(chosen: Strategy, config: LlamaConfig = T0) -> AnnotationPlan:
    graph = trace(Llama(config))
    return annotate(chosen, config.facts, graph.parameters, graph.reshards, graph.inputs)


def counts_of(chosen: Strategy) -> list[tuple[int, int, int]]:
    return [(p.micro_batches, p.micro_batch_size, p.context_parallel_size) for p in chosen.pipelines]


@pytest.mark.parametrize("config", [T0, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("chosen", [het4(), EDGES, INTERLEAVED])
def test_a_plan_reads_back_as_its_strategy(
    chosen: Strategy, sequence_parallel: bool, config: LlamaConfig
) -> None:
    chosen = dataclasses.replace(chosen, sequence_parallel=sequence_parallel)
    read = read_plan(
        AnnotationPlan.from_json(plan_of(chosen, config).to_json()), counts_of(chosen), config.facts
    )
    assert dataclasses.replace(read, schedule=chosen.schedule) == chosen


@pytest.mark.parametrize(("written", "model"), [(T0, TIED), (TIED, T0)], ids=["untied plan", "tied plan"])
def test_a_plan_of_a_model_that_is_tied_otherwise_is_refused(
    written: LlamaConfig, model: LlamaConfig
) -> None:
    with pytest.raises(StrategyError, match=r"embedding\.weight is .* it would be"):
        read_plan(plan_of(het4(), written), counts_of(het4()), model.facts)


def test_a_plan_that_no_strategy_writes_is_refused_by_entry() -> None:
    entries = dict(plan_of(het4()))
    entries["layers.1.wq.weight"] = entries["layers.1.wo.weight"]
    with pytest.raises(StrategyError, match=r"layers.1.wq.weight is .* it would be"):
        read_plan(AnnotationPlan(entries), counts_of(het4()), T0.facts)


def test_a_plan_with_another_number_of_pipelines_is_refused() -> None:
    with pytest.raises(StrategyError, match="2 pipelines, micro-batch counts are given for 1"):
        read_plan(plan_of(het4()), [(1, 1, 1)], T0.facts)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_plan_without_its_ends_is_refused(name: str) -> None:
    entries = {key: value for key, value in plan_of(het4()).items() if key != name}
    with pytest.raises(StrategyError, match=f"no entry '{name}'"):
        read_plan(AnnotationPlan(entries), counts_of(het4()), T0.facts)


def test_a_plan_whose_layer_misses_a_pipeline_is_refused() -> None:
    entries = dict(plan_of(het4())) | {"layers.2.entry": Annotation.on((0, 1), {0: 2})}
    with pytest.raises(StrategyError, match=r"no entry 'layers.2.entry' for pipeline 1"):
        read_plan(AnnotationPlan(entries), counts_of(het4()), T0.facts)


RECIPE = """
model: {num_layers: 4, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2,
        vocab_size: 257}
strategy:
  plan: PLAN
  pipelines: [{micro_batches: 3}, {micro_batches: 1}]
training: {train_iters: 1, global_batch_size: 4, seq_length: 16, lr: 1e-3}
"""


def test_a_recipe_names_a_plan_file_in_place_of_stages(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_of(het4()).to_json())
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE.replace("PLAN", str(tmp_path / "plan.json")))
    assert load_recipe(file).make_strategy() == het4()


def test_a_plan_file_holds_the_chunks_of_interleaved_pipelines(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(build(Llama(T0), INTERLEAVED).plan.to_json())
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE.replace("PLAN", str(tmp_path / "plan.json")))
    assert load_recipe(file, ["strategy.schedule=interleaved"]).make_strategy() == INTERLEAVED
    with pytest.raises(RecipeError, match="2 layer ranges on each stage, which schedule 1f1b cannot run"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("plan.json", "gone.json"), "gone.json"),
        (
            ("{micro_batches: 1}", "{micro_batches: 1, stages: [{ranks: 3, layers: 0-3}]}"),
            "both say who does what",
        ),
        (("  plan: PLAN\n", ""), r"stages is missing"),
        (
            ("  pipelines: [{micro_batches: 3}, {micro_batches: 1}]\n", "  dp: 1\n  micro_batches: 2\n"),
            "give pipelines",
        ),
    ],
)
def test_half_a_plan_and_half_a_strategy_are_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (tmp_path / "plan.json").write_text(plan_of(het4()).to_json())
    file = tmp_path / "run.yaml"
    text = RECIPE.replace(*change) if "PLAN" in change[0] or "plan" not in change[0] else RECIPE
    file.write_text(text.replace("PLAN", str(tmp_path / "plan.json")).replace(*change))
    with pytest.raises(RecipeError, match=message):
        load_recipe(file)


def test_a_damaged_plan_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 1, "annotations": {')
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE.replace("PLAN", str(tmp_path / "plan.json")))
    with pytest.raises(HeteroError, match=r"plan.json: plan is not JSON"):
        load_recipe(file)
