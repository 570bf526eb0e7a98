"""`explain`: C1 and C2 as the paper describes them (Figure 19), one rank's view, readable tables."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import C1, C2, SMALL, refusal, run

HIDDEN, FFN, TOKENS = 6656, 17920, 4096
BOUNDARY = TOKENS * HIDDEN * 2
"""Bytes of one micro-batch's activations in BF16: 4096 tokens."""


def explained(*arguments: str) -> Any:
    ended = run("explain", *arguments, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.fixture(scope="module")
def c2() -> Any:
    return explained(C2)


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(SMALL)
    return str(tmp_path / "small.yaml")


def by_name(found: Any) -> dict[str, Any]:
    return {reshard["name"]: reshard for reshard in found["reshards"]}


def operators(found: Any, part: str, layers: range) -> set[tuple[str, ...]]:
    """The operators of one Reshard or gradient in these layers."""
    reshards = by_name(found)
    return {tuple(reshards[f"layers.{layer}.{part}"]["operators"]) for layer in layers}


def test_the_json_has_the_keys_that_scripts_rely_on(c2: Any) -> None:
    assert {"pipelines", "reshards"} <= set(c2)
    for pipeline in c2["pipelines"]:
        assert set(pipeline) == {"micro_batches", "micro_batch_size", "stages"}
        for stage in pipeline["stages"]:
            assert set(stage) == {"ranks", "layers", "tp", "cp"}
            assert len(stage["layers"]) == 2
    assert len(by_name(c2)) == len(c2["reshards"]), "a name stands for one Reshard"
    for reshard in c2["reshards"]:
        assert {"name", "operators", "bytes"} <= set(reshard)
        assert [type(operator) for operator in reshard["operators"]] == [str, str]
        assert type(reshard["bytes"]) is int


def test_c2_has_31_ranks_60_layers_and_64_sequences(c2: Any) -> None:
    """Case O-08: irregular plans are accepted as written."""
    first, second = c2["pipelines"]
    assert (first["micro_batches"], second["micro_batches"]) == (33, 31)
    assert sum(p["micro_batches"] * p["micro_batch_size"] for p in c2["pipelines"]) == 64
    assert c2["sequences_per_step"] == 64
    used = [rank for pipeline in c2["pipelines"] for stage in pipeline["stages"] for rank in stage["ranks"]]
    assert sorted(used) == c2["ranks"] == list(range(31))
    assert c2["idle_ranks"] == [31]
    for pipeline in c2["pipelines"]:
        spans = [stage["layers"] for stage in pipeline["stages"]]
        assert [layer for first, last in spans for layer in range(first, last + 1)] == list(range(60))
    assert [stage["tp"] for stage in second["stages"]] == [4, 4, 4, 2, 1]
    assert second["stages"][3] == {"ranks": [28, 29], "layers": [48, 55], "tp": 2, "cp": 1}


def test_c2_communicates_inside_stages_as_figure_19_says(c2: Any) -> None:
    for part in ("attention", "mlp"):
        assert operators(c2, f"{part}_in", range(56)) == {("AG", "AG")}
        assert operators(c2, f"{part}_out", range(56)) == {("RS", "RS")}
        assert operators(c2, f"{part}_in", range(56, 60)) == {("AG", "Identity")}
        assert operators(c2, f"{part}_out", range(56, 60)) == {("RS", "Identity")}
    reshards = by_name(c2)
    # Each of four ranks sends three quarters around the ring; so in both pipelines, up to layer 47.
    assert reshards["layers.0.attention_in"]["bytes"] == 2 * 3 * BOUNDARY
    assert reshards["layers.48.attention_in"]["bytes"] == (3 + 1) * BOUNDARY
    assert reshards["layers.56.attention_in"]["bytes"] == 3 * BOUNDARY
    assert reshards["layers.0.attention_in"]["backward_operators"] == ["RS", "RS"]


def test_c2_crosses_stages_by_sr_between_equal_and_bsr_between_unequal_stages(c2: Any) -> None:
    sending = {
        number: tuple(by_name(c2)[f"layers.{number}.entry"]["operators"])
        for number in range(60)
        if by_name(c2)[f"layers.{number}.entry"]["bytes"]
    }
    assert sending == {
        **dict.fromkeys((15, 30, 45), ("SR", "Identity")),
        **dict.fromkeys((16, 32), ("Identity", "SR")),
        **dict.fromkeys((48, 56), ("Identity", "BSR")),
    }
    assert {by_name(c2)[f"layers.{number}.entry"]["bytes"] for number in sending} == {BOUNDARY}


def test_c2_synchronises_gradients_by_ar_and_where_tp_differs_by_split_ar(c2: Any) -> None:
    for part in ("wq", "wk", "wv", "wo", "gate", "up", "down"):
        assert operators(c2, f"{part}.weight", range(48)) == {("AR", "AR")}
        assert operators(c2, f"{part}.weight", range(48, 60)) == {("SplitAR", "SplitAR")}
    for part in ("attention_norm", "mlp_norm"):
        assert operators(c2, f"{part}.weight", range(48)) == {("AR+AR", "AR+AR")}
        assert operators(c2, f"{part}.weight", range(48, 56)) == {("AR+SplitAR", "AR+SplitAR")}
        assert operators(c2, f"{part}.weight", range(56, 60)) == {("AR+SplitAR", "SplitAR")}
    reshards = by_name(c2)
    assert reshards["embedding.weight"]["operators"] == ["AR", "AR"]
    assert reshards["head.weight"]["operators"] == ["SplitAR", "SplitAR"]
    # Two pipelines add up: each sends the whole FP32 gradient once, however it is cut.
    assert reshards["layers.0.wq.weight"]["bytes"] == 2 * HIDDEN * HIDDEN * 4
    assert reshards["layers.59.down.weight"]["bytes"] == 2 * FFN * HIDDEN * 4


def test_a_homogeneous_strategy_has_plain_operators_only() -> None:
    found = explained(C1)
    used = {name for line in found["reshards"] for name in line["operators"] + line["backward_operators"]}
    assert used == {"AR", "RS", "AG", "SR", "Identity", "AR+AR"}
    assert all(len(set(line["operators"])) == 1 for line in found["reshards"]), "pipelines are alike"


def test_a_plan_of_80_layers_as_17_17_46_on_24_ranks_is_accepted() -> None:
    stages = "{ranks: 0-7, layers: 0-16}, {ranks: 8-15, layers: 17-33}, {ranks: 16-23, layers: 34-79}"
    found = explained(
        C1,
        "model=llama_70b",
        "cluster.h20.nodes=3",
        f"strategy={{pipelines: [{{micro_batches: 64, stages: [{stages}]}}]}}",
    )
    assert [stage["layers"] for stage in found["pipelines"][0]["stages"]] == [[0, 16], [17, 33], [34, 79]]
    assert found["sequences_per_step"] == 64


def test_c2_with_one_layer_less_is_refused() -> None:
    message = refusal("explain", C2, "strategy.pipelines.1.stages.4.layers=56-58")
    assert message.startswith(f"{C2}: strategy: pipeline 1: layer 59 is missing")


def test_one_rank_sees_what_it_takes_part_in(c2: Any) -> None:
    found = explained(C2, "--rank", "30")
    assert (found["rank"], found["pipeline"], found["stage"]) == (30, 1, 4)
    assert found["groups"] == [group for group in c2["groups"] if 30 in group] != []
    assert {"layers.56.entry", "layers.59.wq.weight", "head.weight"} <= set(by_name(found))
    assert not {"layers.48.entry", "layers.0.wq.weight", "embedding.weight"} & set(by_name(found))
    assert found["actions"].startswith("{RECV_F0} F0 B0 {SEND_B0 RECV_F1} F1")
    shown = run("explain", C2, "--rank", "30").out
    assert "rank 30: pipeline 1, stage 4 (L56-59), " in shown
    assert "its step: {RECV_F0} F0 B0" in shown
    assert "process groups for collectives of rank 30: R12,30 R13,30 R14,30 R15,30\n" in shown


@pytest.mark.parametrize("rank", ["31", "99", "-1"])
def test_a_rank_that_does_not_work_is_refused(rank: str) -> None:
    message = refusal("explain", C2, "--rank", rank)
    assert message == (
        f"{C2}: --rank: rank {rank} works in no pipeline of this strategy; the ranks at work are R0-30"
    )


def boxes(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line[:1] in tuple("┏┃┡│├└+|"))


@pytest.mark.parametrize("recipe", [C1, C2, str(Path(C1).parent.parent / "quickstart.yaml")])
def test_tables_fit_80_columns_and_break_no_name(recipe: str) -> None:
    shown = run("explain", recipe).out
    assert max(map(len, boxes(shown))) <= 80
    assert "…" not in shown
    for name in ("embedding_out", "attention_out", "attention_norm.weight", "final_norm.weight"):
        assert name in shown


def test_the_summary_names_what_the_strategy_amounts_to() -> None:
    shown = run("explain", C2).out
    assert "31 ranks, 60 layers per pipeline, 64 sequences per step, schedule 1f1b, zero 0\n" in shown
    assert "40 process groups for collectives: R0-3 R0,16 " in shown
    assert "idle: R31" in shown
    assert "\nIdentity, nothing is sent: entry in layers 0-14, 17-29, 31, 33-44, " in shown


def test_a_tied_weight_is_told_with_the_ranks_that_hold_it(small: str) -> None:
    told = "embedding and head share embedding.weight, which lives on R0-1 R2 R3"
    tied = ("explain", small, "--set", "model.tie_word_embeddings=true")
    assert f"{told}, and its operators are listed in this order\n" in run(*tied).out
    assert "share embedding.weight" not in run("explain", small).out
    found = by_name(explained(*tied[1:]))
    assert "head.weight" not in found
    assert found["embedding.weight"]["operators"] == ["SplitAR"] * 3


def test_idle_ranks_are_named_below_the_pipelines(small: str) -> None:
    moved = ("--set", "strategy.pipelines.1.stages.0.ranks=4", "--set", "strategy.idle_ranks=3")
    assert re.search(r"^ *idle: R3 *$", run("explain", small, *moved).out, re.MULTILINE)
    found = explained(small, *moved)
    assert (found["ranks"], found["idle_ranks"]) == ([0, 1, 2, 4], [3])


def test_idle_ranks_are_folded_into_runs_and_never_broken() -> None:
    assert "\nidle: R15,40-47\n" in run("explain", str(Path(C1).parent / "c6.yaml")).out


def test_stages_on_faster_devices_take_less_time_in_the_bubble() -> None:
    """Two stages of TP 8 and 30 layers, on H20 alone and with the first on H800: by hand."""
    even = ("strategy={pp: 2, tp: 8, micro_batches: 8, micro_batch_size: 1}", "training.global_batch_size=8")
    same = run("explain", C1, "cluster={h20: {nodes: 2}}", *even).out
    unequal = run("explain", C1, "cluster={h800: {nodes: 1}, h20: {nodes: 1}}", *even).out
    assert "bubble: 11.1% (" in same
    # Stage 1 works through 8 micro-batches, one forward and backward of stage 0 go before and after.
    assert f"bubble: {100 * (1 - 4 * (1 + 148 / 990) / (8 + 148 / 990)):.1f}% (" in unequal


def test_zero_1_shows_how_parameters_come_from_their_optimizer_states(small: str) -> None:
    """Two replicas of one rank: each sends the half of a norm's 32 weights that it updates, in FP32."""
    sharded = (
        "explain",
        small,
        "strategy={dp: 2, micro_batches: 2, zero: 1}",
        "training.global_batch_size=4",
    )
    found = by_name(explained(*sharded[1:]))["final_norm.weight"]
    assert (found["operators"], found["bytes"]) == (["RS", "RS"], 2 * 16 * 4)
    assert (found["backward_operators"], found["backward_bytes"]) == (["AG", "AG"], 2 * 16 * 4)
    assert "parameters back from cut optimizer states, per step; MB" in run(*sharded).out
    assert "cut optimizer states" not in run("explain", small).out


def test_deep_pipelines_are_continued_below(small: str) -> None:
    shown = run("explain", small, "strategy={pp: 12, micro_batches: 3}", "model.num_layers=12").out
    assert max(map(len, boxes(shown))) <= 80
    assert "…" not in shown
    assert [line.strip() for line in shown.splitlines() if line.startswith("strategy, from")] == [
        "strategy, from stage 6"
    ]
    assert all(f"R{rank} " in shown and f"stage {rank} " in shown for rank in range(12))


def test_a_single_rank_communicates_nothing(small: str) -> None:
    shown = run("explain", small, "strategy={micro_batches: 3}").out
    assert "1 rank, 2 layers per pipeline" in shown
    assert "0 process groups for collectives: none\n" in shown
    assert shown.count("Identity, nothing is sent: ") == 2
    assert "(1 stage)" in shown


def test_the_time_grid_is_drawn_on_request(small: str) -> None:
    grid = "stage 1 | .  F0 B0 == F1 B1 == .  ."
    assert grid in run("explain", small, "--schedule").out
    assert grid not in run("explain", small).out
    assert grid in explained(small, "--schedule")["grid"]


def test_a_plan_that_cannot_be_written_is_refused(small: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "plan.json"
    message = refusal("explain", small, "--plan", str(path))
    assert message == f"--plan: {path} cannot be written: No such file or directory"


def test_overrides_are_arguments_or_options(small: str) -> None:
    changed = explained(small, "strategy.schedule=gpipe", "--set", "strategy.sequence_parallel=false")
    assert changed["schedule"] == "gpipe"
    assert by_name(changed)["layers.0.attention_out"]["operators"] == ["AR", "Identity"]


def test_a_terminal_without_unicode_and_a_reader_that_stops_early_do_no_harm(small: str) -> None:
    """`explain RECIPE | head -1` in an ASCII locale."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "hetero_megatron", "explain", small]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert [process.stdout.readline()[:8], process.stdout.readline()[:8]] == ["strategy", "+-------"]
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


CHUNKS = (
    "model.num_layers=6",
    "strategy={schedule: interleaved, pipelines: [{micro_batches: 2, "
    "stages: [{ranks: 0, layers: '0, 2'}, {ranks: 1, layers: '1, 3-5'}]}]}",
    "training.global_batch_size=2",
)


def test_an_interleaved_strategy_is_drawn_and_timed_by_its_chunks(small: str) -> None:
    """Chunks of 1, 1, 1 and 3 layers: by hand, 36 of 2 x 27 units are worked."""
    shown = run("explain", small, *CHUNKS, "--schedule").out
    assert "bubble: 33.3% (" in shown
    assert "L0,2" in shown
    assert "L1,3-5" in shown
    assert "pipeline 0: 2 stages of 2 chunks, 2 micro-batches, " in shown
    assert "stage 1 | .    F0   F1   F0.1 B0.1 ==== F1.1 B1.1 ==== B0   ==" in shown
    assert explained(small, *CHUNKS)["pipelines"][0]["stages"][1]["layers"] == [[1, 1], [3, 5]]


def test_a_schedule_written_to_a_file_is_one_that_a_recipe_can_name(small: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    before = explained(small, *CHUNKS, "--schedule", "--rank", "1", "--schedule-csv", str(path))
    assert path.read_text().splitlines()[2] == "0,1,F0,F1,F0.1,B0.1,F1.1,B1.1,B0,B1"
    after = explained(small, *CHUNKS, f"strategy.schedule={path}", "--schedule", "--rank", "1")
    assert after == before | {"schedule": str(path)}


def test_a_schedule_that_cannot_be_written_is_refused(small: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "mine.csv"
    message = refusal("explain", small, "--schedule-csv", str(path))
    assert message == f"--schedule-csv: {path} cannot be written: No such file or directory"


def test_a_homogeneous_plan_of_dp_cp_and_tp_has_plain_collectives_only(tmp_path: Path) -> None:
    """Context-parallel parts are subgroups, and alike ones cost nothing more than their Megatron equivalent."""
    recipe = tmp_path / "even.yaml"
    recipe.write_text(
        SMALL.split("strategy:")[0] + "strategy: {dp: 2, cp: 2, tp: 2, micro_batches: 2, "
        "micro_batch_size: 1}\ntraining: {train_iters: 1, global_batch_size: 4, seq_length: 64, lr: 1}\n"
    )
    for mode in ("ring", "ulysses"):
        found = explained(str(recipe), "--set", f"strategy.context_parallel={mode}")
        for reshard in found["reshards"]:
            every = {*reshard["operators"], *reshard["backward_operators"]}
            assert every <= {"AR", "AG", "RS", "AR+AR", "Identity"}, reshard
        forward = by_name(found)["layers.0.attention_in"]
        assert forward["operators"] == ["AG"] * 4
        # Each of four parts has 32 tokens of 32 features in FP32, and each of its two ranks sends its half.
        assert forward["bytes"] == 4 * 32 * 32 * 4
        plain = [[0, 1], [0, 2, 4, 6], [1, 3, 5, 7], [2, 3], [4, 5], [6, 7]]
        lanes = [[0, 2], [1, 3], [4, 6], [5, 7]] if mode == "ulysses" else []
        assert found["groups"] == sorted([*plain, *lanes])
    assert "context-parallel parts one after the other" in run("explain", str(recipe)).out


def test_unequal_parts_are_counted_with_their_own_tokens(tmp_path: Path) -> None:
    recipe = tmp_path / "uneven.yaml"
    recipe.write_text(
        SMALL.split("strategy:")[0] + "strategy: {pipelines: [{micro_batches: 1, micro_batch_size: 1, "
        "stages: [{ranks: 0-2, layers: 0-1, tp: [2, 1]}]}]}\n"
        "training: {train_iters: 1, global_batch_size: 1, seq_length: 96, lr: 1}\n"
    )
    forward = by_name(explained(str(recipe)))["layers.0.attention_in"]
    assert forward["bytes"] == 64 * 32 * 4, (
        "only the part of two ranks, with two thirds of the tokens, gathers"
    )
