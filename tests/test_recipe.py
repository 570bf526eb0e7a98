"""Recipes: what they mean, and that nothing wrong gets through (case O-06: unknown keys ignored)."""

import json
import re
from pathlib import Path

import pytest

from hetero_megatron.data.byte_documents import ByteDocuments
from hetero_megatron.errors import RecipeError
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.pipeline.schedule import gpipe
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.recipe_refusals import nearest
from hetero_megatron.recipe_text import layer_ranges, number_list
from hetero_megatron.strategy import Pipeline, Recompute, Stage

RECIPES = Path(__file__).parent.parent / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"
GOOD = """
model: llama_tiny
strategy:
  pipelines:
  - micro_batches: 2
    micro_batch_size: 2
    stages:
    - {ranks: 0-1, layers: 0-5}
    - {ranks: 2, layers: 6-7}
training: {train_iters: 3, global_batch_size: 4, seq_length: 32, lr: 1e-4}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def refused(override: str) -> str:
    """What the quickstart recipe is refused with after one change."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, [override])
    assert str(QUICKSTART) in str(caught.value)
    return str(caught.value).replace(str(QUICKSTART), "FILE")


def test_a_good_recipe_becomes_model_strategy_cluster_and_training(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, GOOD))
    stages = (Stage((0, 1), (0, 5), 2, 1), Stage((2,), (6, 7), 1, 1))
    assert recipe.make_strategy().pipelines == (Pipeline(2, 2, stages),)
    assert recipe.make_config() == PRESETS["llama_tiny"]
    assert recipe.make_cluster().ranks == (0, 1, 2)
    assert recipe.training.lr == 1e-4
    assert recipe.training.clip_grad is None
    assert recipe.output.folder == "runs/latest"


def test_the_quickstart_has_uneven_pipelines_on_four_ranks() -> None:
    strategy = load_recipe(QUICKSTART).make_strategy()
    assert strategy.ranks == (0, 1, 2, 3)
    assert strategy.pipelines[0].stages[0].tensor_parallel_size == 2
    assert len({pipeline.micro_batches for pipeline in strategy.pipelines}) == 2
    assert len({len(pipeline.stages) for pipeline in strategy.pipelines}) == 2


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [("c1", 32, (16, 16)), ("c2", 31, (33, 31))])
def test_the_papers_c1_and_c2_at_full_size(name: str, ranks: int, micro_batches: tuple[int, ...]) -> None:
    recipe = load_recipe(RECIPES / "paper" / f"{name}.yaml", ["model.vocab_size=30592"])
    strategy = recipe.make_strategy()
    assert len(strategy.ranks) == ranks
    assert tuple(pipeline.micro_batches for pipeline in strategy.pipelines) == micro_batches
    assert strategy.rows_per_step == recipe.training.global_batch_size == 64
    assert len(recipe.make_cluster().ranks) == 32
    assert recipe.make_config().vocab_size == 30592
    assert recipe.training.precision == "bf16"


def test_c2_shrinks_the_second_pipelines_tail() -> None:
    pipeline = load_recipe(RECIPES / "paper" / "c2.yaml").make_strategy().pipelines[1]
    assert [stage.tensor_parallel_size for stage in pipeline.stages] == [4, 4, 4, 2, 1]
    assert [len(stage.layer_numbers) for stage in pipeline.stages] == [16, 16, 16, 8, 4]


def test_overrides_are_dotted_and_read_as_yaml() -> None:
    changes = [
        "training.lr=1e-3",
        "training.clip_grad=0",
        "strategy.pipelines[1].stages.0.ranks=[3]",
        "model.hidden_size=256",
        "output.folder=elsewhere",
        "cluster={cpu: {nodes: 1, devices_per_node: 4}}",
    ]
    recipe = load_recipe(QUICKSTART, changes)
    assert recipe.training.lr == 1e-3
    assert recipe.training.clip_grad is None
    assert recipe.make_config().hidden_size == 256
    assert recipe.make_config().num_attention_heads == PRESETS["llama_tiny"].num_attention_heads
    assert recipe.output.folder == "elsewhere"


def test_a_model_may_be_written_out() -> None:
    sizes = "num_layers: 4, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 4, num_query_groups: 4"
    config = load_recipe(QUICKSTART, [f"model={{{sizes}, vocab_size: 300}}"]).make_config()
    assert (config.hidden_size, config.vocab_size) == (64, 300)


def test_the_homogeneous_shorthand_spells_out_equal_pipelines() -> None:
    change = "strategy={dp: 2, tp: 2, pp: 3, micro_batches: 2, micro_batch_size: 2}"
    pipelines = load_recipe(QUICKSTART, [change]).make_strategy().pipelines
    assert [[stage.ranks for stage in pipeline.stages] for pipeline in pipelines] == [
        [(0, 1), (2, 3), (4, 5)],
        [(6, 7), (8, 9), (10, 11)],
    ]
    assert [stage.layers for stage in pipelines[1].stages] == [(0, 1), (2, 2), (3, 3)]


def test_recompute_and_offload_of_the_shorthand_hold_for_all_stages_as_far_as_they_hold_the_layers() -> None:
    change = "strategy={pp: 2, micro_batches: 8, recompute: {full: 0-2, selective: 3}, offload: true}"
    first, second = load_recipe(QUICKSTART, [change]).make_strategy().pipelines[0].stages
    assert first.recompute == (Recompute("full", (0, 1)),)
    assert second.recompute == (Recompute("full", (2, 2)), Recompute("selective", (3, 3)))
    assert first.offload
    assert second.offload
    change = "strategy={dp: 2, tp: 2, micro_batches: 4, recompute: selective}"
    for pipeline in load_recipe(QUICKSTART, [change]).make_strategy().pipelines:
        (stage,) = pipeline.stages
        assert [stage.recompute_of(layer) for layer in range(4)] == ["selective"] * 4
        assert not stage.offload


def test_a_stage_without_layers_holds_only_the_head() -> None:
    changes = ["strategy.pipelines.0.stages.0.layers=0-3", "strategy.pipelines.0.stages.1.layers="]
    assert load_recipe(QUICKSTART, changes).make_strategy().pipelines[0].stages[1].layers is None


def test_data_is_the_standard_library_a_folder_or_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    names = {
        "training.seed=1": "__future__.py",
        f"data={tmp_path}": "a.txt",
        f"data.files=[{tmp_path / 'a.txt'}]": str(tmp_path / "a.txt"),
    }
    for change, name in names.items():
        [source] = load_recipe(QUICKSTART, [change]).open_sources(print)
        assert isinstance(source.documents, ByteDocuments)
        assert source.documents.name(0) == name


def test_the_json_schema_admits_shorthands_and_names_every_section() -> None:
    schema = Recipe.json_schema()
    assert set(schema["properties"]) == {
        "model",
        "cluster",
        "strategy",
        "data",
        "training",
        "kernels",
        "evaluation",
        "checkpoint",
        "logging",
        "elastic",
        "output",
        "planning",
    }
    assert "string" in json.dumps(schema["properties"]["model"])
    assert "train_iters" in schema["$defs"]["TrainingSection"]["properties"]


def test_numbers_and_ranges() -> None:
    assert number_list("28-31,3") == (28, 29, 30, 31, 3)
    assert number_list([0, "2-3"]) == (0, 2, 3)
    assert number_list(30) == (30,)
    assert layer_ranges("0-14") == layer_ranges([0, 14]) == ((0, 14),)
    assert layer_ranges(5) == layer_ranges("5") == ((5, 5),)
    assert layer_ranges("0-3, 8-11") == layer_ranges(["0-3", "8-11"]) == ((0, 3), (8, 11))
    assert layer_ranges(None) is None


def test_the_nearest_name_looks_at_letters_and_parts() -> None:
    assert nearest("gradient_cliping", ["lr", "clip_grad", "min_lr"]) == "clip_grad"
    assert nearest("tensor_model_parallel_size", ["ranks", "tp"]) == "tp"
    assert nearest("xyzzy", ["lr", "clip_grad"]) is None
    assert nearest("lr", []) is None


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "training.gradient_cliping=1",
            "FILE: training.gradient_cliping: unknown key; did you mean clip_grad?",
        ),
        (
            "strategy.pipelines.0.stages.1.tp_siz=2",
            "FILE: strategy.pipelines[0].stages[1].tp_siz: unknown key; did you mean tp?",
        ),
        (
            'strategy.pipelines.0.stages.0.tp="2"',
            'FILE: strategy.pipelines[0].stages[0].tp: "2" is text, a whole number is needed',
        ),
        (
            "strategy.pipelines.0.micro_batches=2.5",
            "FILE: strategy.pipelines[0].micro_batches: 2.5 is a fractional number, a whole number is needed",
        ),
        ("trainning.lr=1", "FILE: trainning: unknown key; did you mean training?"),
        (
            "extras.a=1",
            "FILE: extras: unknown key; known here: checkpoint, cluster, data, elastic, evaluation, kernels, "
            "logging, model, output, planning, strategy, training",
        ),
        (
            "training.micro_batch_size=1",
            "training.micro_batch_size: unknown key here; micro_batch_size belongs to strategy.pipelines[]",
        ),
        ("output.lr=1", "FILE: output.lr: unknown key here; lr belongs to training"),
        ("model=llama_tny", "FILE: model.preset: there is no model 'llama_tny'; did you mean llama_tiny?"),
        ("model={hidden_size: 64}", "FILE: model.num_layers: missing; give it, or name a preset"),
        (
            "model.num_query_groups=3",
            "FILE: model: 4 attention heads cannot share 3 kv heads: 3 must divide 4",
        ),
        ("model.vocab_size=200", "FILE: model.vocab_size: 200 is too small; byte tokens need 257"),
        ("model.hidden_size=null", "FILE: model.hidden_size: nothing is given, a whole number is needed"),
        ("cluster.h21.nodes=4", "FILE: cluster.h21: unknown key; did you mean h20?"),
        ("cluster={}", "FILE: cluster: is empty, at least one is needed"),
        ("training.lr=abc", 'FILE: training.lr: "abc" is text, a number is needed'),
        ("training.lr=.inf", "FILE: training.lr: inf is not finite, a finite number is needed"),
        ("training.lr=true", "FILE: training.lr: true is a truth value, a number is needed"),
        ("training.lr=[1]", "FILE: training.lr: [1] is a list, a number is needed"),
        ("training.lr=-1", "FILE: training.lr: -1 does not do: it must be greater than or equal to 0"),
        ("training.min_lr=1", "FILE: training: min_lr 1 is above lr"),
        ("training.precision=bf17", "\"bf17\" is text, 'fp32' or 'bf16' is needed; did you mean bf16?"),
        ("training.optimizer=3", "3 is a whole number, 'adam' or 'sgd' is needed"),
        ("training={lr: 1.0, seq_length: 8, train_iters: 1}", "FILE: training.global_batch_size: missing"),
        ("training=3", "FILE: training: 3 is a whole number, a mapping is needed"),
        (
            "training.global_batch_size=100",
            "FILE: training.global_batch_size: global_batch_size 100 does not fit",
        ),
        (
            "kernels.attention=flash_attn",
            'FILE: kernels.attention: "flash_attn" is text, '
            "'auto', 'flash-attn', 'transformer-engine', 'torch-varlen' or 'torch-sdpa' is needed; "
            "did you mean flash-attn?",
        ),
        ("kernels.adm=auto", "FILE: kernels.adm: unknown key; did you mean adam?"),
        ("training.rms_norm=apex", "FILE: training.rms_norm: unknown key here; rms_norm belongs to kernels"),
        ("strategy=best", '"best" is no strategy; write auto, or a mapping with pipelines'),
        ("strategy.dp=2", "FILE: strategy: dp describes all pipelines alike; drop it, or drop pipelines"),
        ("strategy={tp: 2}", "FILE: strategy: write pipelines, or dp, tp and pp together with micro_batches"),
        (
            "strategy.recompute=full",
            "FILE: strategy: recompute describes all pipelines alike; drop it, or drop",
        ),
        (
            "strategy={pp: 2, micro_batches: 3, recompute: {full: 0-4}}",
            "FILE: strategy.recompute: full names layer 4, but the model has layers 0-3",
        ),
        (
            "strategy={micro_batches: 3, recompute: half}",
            'FILE: strategy.recompute: "half" is text; write none, full or selective, or the layers of each, such as '
            "{full: 0-3, selective: 4-7}",
        ),
        (
            "strategy={micro_batches: 3, recompute: {ful: 0-1}}",
            "FILE: strategy.recompute: there is no 'ful'; known: full, selective; did you mean full?",
        ),
        (
            "strategy.pipelines.0.stages.0.recompute={full: a}",
            'FILE: strategy.pipelines[0].stages[0].recompute: "a" is no range; write one such as 0-3',
        ),
        (
            "strategy.pipelines.0.stages.0.tp=[2, 0]",
            "FILE: strategy.pipelines[0].stages[0].tp: [2, 0] is a list; a list names one degree, 1 or more, for each",
        ),
        (
            "strategy={pp: 9, micro_batches: 1}",
            "FILE: strategy.pp: 9 stages for 4 layers; each stage needs a layer",
        ),
        ("strategy.zero=1.0", "FILE: strategy.zero: 1 is a fractional number, a whole number is needed"),
        (
            "strategy.sequence_parallel=on",
            'FILE: strategy.sequence_parallel: "on" is text, true or false is needed',
        ),
        ("strategy.pipelines={a: 1}", "FILE: strategy.pipelines: {'a': 1} is a mapping, a list is needed"),
        ("strategy.pipelines.0.stages.1.layers=[1, 2, 3]", "[1, 2, 3] is a list; write layers as first-last"),
        ("strategy.pipelines.0.stages.1.layers=3-0", '"3-0" runs backwards; write 0-3'),
        (
            "strategy.pipelines.0.stages.1.layers=9",
            "FILE: strategy: pipeline 0 stage 1: layer 9 is beyond the model",
        ),
        ("strategy.pipelines.0.stages.0.ranks=a-b", '"a-b" is no range; write one such as 0-3'),
        ("strategy.pipelines.0.stages.0.ranks=0-999999", "lists 1000000 numbers; at most 10000 can be meant"),
        (
            "strategy.pipelines.0.stages.0.ranks=1.5",
            "1.5 is a fractional number; write a number, a list such as",
        ),
        (
            "data={folder: a, files: [b]}",
            "FILE: data: folder and files are both given; one of them is the corpus",
        ),
        ("data.suffixes=[.py]", "FILE: data: suffixes choose files in a folder; give folder too"),
        ("training.lr", "override 'training.lr': write path=value, for example training.lr=1e-4"),
        ("training.lr.x=1", "override 'training.lr.x=1': there is no 'x' inside"),
        ("training.lr.x.y=1", "override 'training.lr.x.y=1': there is no 'x' inside"),
        ("strategy.pipelines.7.micro_batches=1", "'7' is no place in a list of 2; write 0 to 1"),
        (
            "training.lr=[1",
            "line 1: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence)",
        ),
    ],
)
def test_one_wrong_change_is_refused_with_its_path_and_what_would_be_right(
    override: str, sentence: str
) -> None:
    assert sentence in refused(override)


def test_a_cut_off_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD[: GOOD.index("0-5}") + 2])
    with pytest.raises(RecipeError, match=r"recipe\.yaml, line \d+: .* is the file cut off\?"):
        load_recipe(path)


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "output: a\noutput: b\n")
    with pytest.raises(RecipeError, match=r"line 12: key 'output' stands here twice"):
        load_recipe(path)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["training.lr=x", "training.seed=-1", "output.fold=x"])
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match="is not a mapping; it needs the sections model, strategy, training"
    ):
        load_recipe(written(tmp_path, "- a\n- b\n"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe .*nowhere\.yaml cannot be read: No such file"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(RecipeError, match="is not UTF-8 text: byte 7 is invalid"):
        load_recipe(path)


def test_a_file_with_control_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape("recipe.yaml is not YAML: ")):
        load_recipe(written(tmp_path, "model: \x00"))


def test_an_automatic_split_of_seven_layers_over_three_stages_loses_none(tmp_path: Path) -> None:
    text = """
model: {preset: llama_tiny, num_layers: 7}
strategy: {pp: 3, micro_batches: 2, micro_batch_size: 1}
training: {train_iters: 1, global_batch_size: 2, seq_length: 16, lr: 1e-3}
"""
    (tmp_path / "auto.yaml").write_text(text)
    (pipeline,) = load_recipe(tmp_path / "auto.yaml").make_strategy().pipelines
    assert [list(stage.layer_numbers) for stage in pipeline.stages] == [[0, 1, 2], [3, 4], [5, 6]]


# Interleaved pipelines, and schedules as files.

CHUNKS = "strategy={pp: 2, vp: 3, tp: 2, micro_batches: 4, micro_batch_size: 2, schedule: interleaved}"


def test_vp_cuts_the_layers_as_evenly_as_possible_into_chunks() -> None:
    strategy = load_recipe(QUICKSTART, [CHUNKS, "model.num_layers=8"]).make_strategy()
    assert strategy.schedule == "interleaved"
    assert [(stage.ranks, stage.layers) for stage in strategy.pipelines[0].stages] == [
        ((0, 1), ((0, 1), (4, 4), (6, 6))),
        ((2, 3), ((2, 3), (5, 5), (7, 7))),
    ]


def test_vp_needs_a_layer_for_every_chunk_and_the_interleaved_schedule() -> None:
    assert "strategy.vp: 2 stages of 3 chunks for 4 layers; each chunk needs a layer" in refused(CHUNKS)
    plain = CHUNKS.replace(", schedule: interleaved", "").replace("vp: 3", "vp: 2")
    assert "strategy: pipeline 0 has 2 layer ranges on each stage, which schedule 1f1b cannot run" in refused(
        plain
    )
    assert "unknown key; did you mean vp?" in refused("strategy.virtual_pipeline_model_parallel_size=2")


def test_a_stage_lists_several_chunks() -> None:
    changes = [
        "strategy.schedule=interleaved",
        "strategy.pipelines.0.stages.0.layers=0, 2",
        "strategy.pipelines.0.stages.1.layers=1, 3",
    ]
    stages = load_recipe(QUICKSTART, changes).make_strategy().pipelines[0].stages
    assert [stage.chunks for stage in stages] == [((0, 0), (2, 2)), ((1, 1), (3, 3))]


def test_an_unknown_schedule_is_refused_with_what_may_stand_there() -> None:
    assert (
        "strategy.schedule: schedule 'interleave' is unknown; did you mean 'interleaved'? "
        "(or write the path of a .csv file)" in refused("strategy.schedule=interleave")
    )
    schema = Recipe.json_schema()["$defs"]["StrategySection"]["properties"]["schedule"]
    assert schema["anyOf"][0]["enum"] == ["gpipe", "1f1b", "interleaved"]


def test_a_schedule_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("pipeline,stage,actions\n0,0,F0,F1,F2,B0,B1,B2\n0,1,F0,F1,F2,B0,B1,B2\n1,0,F0,B0\n")
    strategy = load_recipe(QUICKSTART, [f"strategy.schedule={path}"]).make_strategy()
    assert (strategy.schedule, strategy.schedule_tasks) == (str(path), (gpipe(2, 3), gpipe(1, 1)))
    other = [f"strategy.schedule={path}", "strategy.pipelines.0.micro_batches=4"]
    with pytest.raises(RecipeError, match="pipeline 0 has 3 micro-batches there and 4 in the strategy"):
        load_recipe(QUICKSTART, other)


def test_a_schedule_file_that_is_wrong_or_missing_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert f"strategy.schedule: {path}: No such file or directory" in refused(f"strategy.schedule={path}")
    path.write_text("pipeline,stage,actions\n0,0,F0,X0\n")
    assert f"strategy.schedule: {path} line 2: 'X0' is no action" in refused(f"strategy.schedule={path}")
    path.write_bytes(b"\xff")
    assert f"strategy.schedule: {path} is not UTF-8 text: byte 0" in refused(f"strategy.schedule={path}")


@pytest.mark.parametrize("change", ["tp=[1, 0]", "tp=[]", "layers=3-0", "recompute=half"])
def test_one_fault_in_a_stage_is_told_once_and_the_lists_around_it_are_not_called_empty(
    change: str,
) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, [f"strategy.pipelines.0.stages.0.{change}"])
    assert "\n" not in str(refused.value)


def test_a_list_of_degrees_and_another_number_of_parts_contradict_each_other() -> None:
    stages = "[{ranks: 0-2, layers: 0-3, tp: [2, 1], cp: 3}]"
    with pytest.raises(
        RecipeError, match=r"strategy: pipeline 0 stage 0: cp 3, but tp \[2, 1\] names 2 parts"
    ):
        load_recipe(QUICKSTART, [f"strategy={{pipelines: [{{micro_batches: 8, stages: {stages}}}]}}"])


def _with_plans(tmp_path, text):
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    return ["elastic.plans=[" + str(plan) + "]"]


def test_prepared_plan_needs_a_strategy_section(tmp_path):
    with pytest.raises(RecipeError, match=r"elastic\.plans\[0\].*no section `strategy`"):
        load_recipe("recipes/paper/c2.yaml", _with_plans(tmp_path, "model: llama_32b\n"))


def test_prepared_plan_is_checked_as_the_strategy_is(tmp_path):
    text = "strategy:\n  pipelines:\n  - {micro_batches: 64, micro_batch_size: 1, stages: [{ranks: 0-7, layer: 0-59}]}\n"
    with pytest.raises(RecipeError, match="elastic.plans.*layer"):
        load_recipe("recipes/paper/c2.yaml", _with_plans(tmp_path, text))


def test_prepared_plan_takes_the_rows_of_the_run(tmp_path):
    text = Path("recipes/paper/c3.yaml").read_text().replace("micro_batches: 32", "micro_batches: 31")
    with pytest.raises(RecipeError, match=r"elastic\.plans\[0\].*64 does not fit.*62 rows"):
        load_recipe("recipes/paper/c2.yaml", _with_plans(tmp_path, text))
