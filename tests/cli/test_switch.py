"""`switch`: Table 4 of the paper, cell by cell, and switches that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import C1, C2, refusal, run

# Table 4: rank: (NVLink, InfiniBand) in thousandths of 2**30 bytes. Ranks that are absent send nothing.
WITHOUT_HEURISTICS = {
    **{4: (0, 748), 5: (0, 747), 6: (0, 747), 7: (0, 747)},
    **{8: (0, 1495), 9: (0, 1495), 10: (0, 1495), 11: (0, 1495)},
    **{12: (0, 5517), 13: (0, 11496), 14: (0, 8222), 15: (0, 11496)},
}
FUSED = {
    **{8: (0, 747), 9: (0, 747), 10: (0, 747), 11: (0, 747), 15: (0, 11496)},
    **{20: (748, 0), 21: (748, 0), 22: (748, 0), 23: (748, 0)},
    **{24: (0, 748), 25: (0, 748), 26: (0, 748), 27: (0, 748)},
    **{28: (5517, 0), 29: (11496, 0), 30: (8222, 0)},
}
TABLE_4 = ("--lost", "31", "--bytes-per-parameter", "6", "--set", "model.vocab_size=30592")
MODEL = "model: {preset: llama_tiny, num_layers: 2}\n"
TRAINING = "training: {train_iters: 1, global_batch_size: 2, seq_length: 8, lr: 1e-3}\n"


@pytest.fixture(scope="module")
def table_4() -> Any:
    ended = run("switch", C1, C2, *TABLE_4, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def cells(sent: dict[str, dict[str, int]]) -> dict[int, tuple[int, int]]:
    """In the table's unit."""
    return {
        int(rank): (round(links["nvlink"] / 2**30 * 1000), round(links["ib"] / 2**30 * 1000))
        for rank, links in sent.items()
    }


def recipe(folder: Path, name: str, strategy: str, more: str = "") -> str:
    (folder / name).write_text(f"{MODEL}strategy: {strategy}\n{TRAINING}{more}")
    return str(folder / name)


@pytest.fixture
def three(tmp_path: Path) -> str:
    """Ranks 0 and 1 hold a layer each, rank 2 both."""
    stages = "[{micro_batches: 1, stages: [{ranks: 0, layers: 0}, {ranks: 1, layers: 1}]},"
    return recipe(
        tmp_path,
        "three.yaml",
        f"{{pipelines: {stages} {{micro_batches: 1, stages: [{{ranks: 2, layers: 0-1}}]}}]}}",
    )


@pytest.fixture
def one(tmp_path: Path) -> str:
    """Rank 0 holds everything."""
    stages = "[{micro_batches: 2, stages: [{ranks: 0, layers: 0-1}]}]"
    return recipe(tmp_path, "one.yaml", f"{{idle_ranks: 1-2, pipelines: {stages}}}")


def test_every_cell_of_table_4_comes_out(table_4: Any) -> None:
    assert set(table_4["bytes_sent"]) == {"naive", "unfused", "fused"}
    assert cells(table_4["bytes_sent"]["naive"]) == WITHOUT_HEURISTICS
    assert cells(table_4["bytes_sent"]["fused"]) == FUSED


def test_without_fusion_the_volume_is_the_same_and_one_node_idles(table_4: Any) -> None:
    unfused = cells(table_4["bytes_sent"]["unfused"])
    assert not {24, 25, 26, 27} & set(unfused)
    assert [unfused[rank] for rank in (8, 9, 10, 11)] == [(0, 1495)] * 4
    totals = {sum(sum(by.values()) for by in sent.values()) for sent in table_4["bytes_sent"].values()}
    assert len(totals) == 1


def test_the_json_has_whole_bytes_by_rank_and_link(table_4: Any) -> None:
    for sent in table_4["bytes_sent"].values():
        for rank, links in sent.items():
            assert rank.isdigit()
            assert set(links) == {"nvlink", "ib"}
            assert {type(count) for count in links.values()} == {int}
    assert (table_4["lost"], table_4["bytes_per_parameter"]) == ([31], 6)


def test_the_table_fits_80_columns_and_says_what_it_counts() -> None:
    ended = run("switch", C1, C2, *TABLE_4)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ended.out.startswith("GB (1e9 bytes) that each rank sends, 6 bytes per parameter")
    (row,) = [line for line in ended.out.splitlines() if line.startswith("│   28 │")]
    assert row.replace("│", " ").split() == ["28", "-", "-", "5.924", "-", "5.924", "-"]
    assert "fused    heuristics, all tensors in one table; 31 messages, one per rank pair\n" in ended.out


def test_links_that_nobody_uses_have_no_column(three: str, one: str) -> None:
    shown = run("switch", three, one).out
    assert "loopback" in shown
    assert "ib" not in shown.split("naive    ")[0].replace("unfused", "")


def test_a_switch_to_the_same_strategy_sends_nothing(three: str) -> None:
    assert (
        run("switch", three, three).out == "nothing has to be sent: every rank already holds what it needs\n"
    )


def test_one_living_copy_is_enough(three: str, one: str) -> None:
    ended = run("switch", three, one, "--lost", "2", "--json")
    assert set(json.loads(ended.out)["bytes_sent"]["fused"]) == {"1"}


def test_a_tensor_whose_holders_are_all_lost_is_refused(three: str, one: str) -> None:
    message = refusal("switch", three, one, "--lost", "1,2")
    assert message.startswith("layers.1.")
    assert "is needed by rank 0, but every owner (1, 2) is lost" in message


def test_a_lost_rank_that_the_new_strategy_uses_is_refused() -> None:
    message = refusal("switch", C1, C1, "--lost", "31")
    assert (
        message == f"{C1}: rank 31 is lost, but the new strategy uses it; list it under strategy.idle_ranks"
    )
    assert "rank 12 is lost" in refusal("switch", C1, C2, "--lost", "12-15,28-31")


def test_a_lost_rank_that_no_cluster_has_is_refused() -> None:
    assert refusal("switch", C1, C2, "--lost", "99") == "--lost: rank 99 is not in the cluster (ranks R0-31)"


@pytest.mark.parametrize("ranks", ["31,3x", "-1", "5-2"])
def test_lost_ranks_that_are_no_list_are_refused(ranks: str) -> None:
    assert refusal("switch", C1, C2, "--lost", ranks).startswith(f'--lost: "{ranks}" ')


def test_recipes_of_different_models_are_refused(three: str) -> None:
    message = refusal("switch", C1, three)
    assert message.startswith(
        "FROM and TO are different models (num_layers 60 and 2, hidden_size 6656 and 128, "
    )
    assert message.endswith("a switch changes the strategy, not the model")


def test_recipes_of_different_clusters_are_refused(three: str, tmp_path: Path) -> None:
    stages = "[{micro_batches: 2, stages: [{ranks: 0, layers: 0-1}]}]"
    cluster = "cluster: {h20: {nodes: 1, devices_per_node: 1}}\n"
    other = recipe(tmp_path, "other.yaml", f"{{pipelines: {stages}}}", cluster)
    assert refusal("switch", three, other) == (
        "rank 0 is another device in FROM (cpu) than in TO (h20); describe the same cluster in both"
    )


def test_a_misspelt_setting_names_the_file_it_does_not_fit() -> None:
    message = refusal("switch", C1, C2, "--set", "trainning.lr=2")
    assert message == f"{C1}: trainning: unknown key; did you mean training?"


def test_a_missing_recipe_is_refused() -> None:
    assert (
        refusal("switch", C1, "/nowhere.yaml")
        == "recipe /nowhere.yaml cannot be read: No such file or directory"
    )
