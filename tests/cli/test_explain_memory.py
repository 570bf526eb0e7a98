"""`explain --memory`: readable, foldable, and honest about what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import C1, C2, SMALL, run

PARTS = ("parameters", "gradients", "master", "moments", "activations", "buffers", "temporary")
ON_CPU = ("--set", "cluster={cpu: {nodes: 4}}")


def table(text: str) -> list[str]:
    return text[text.index("memory per rank") :].splitlines()


def explained(*arguments: str) -> Any:
    ended = run("explain", *arguments, "--memory", "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize("recipe", [C1, C2, str(Path(C1).parent.parent / "quickstart.yaml")])
def test_the_table_fits_100_columns_and_cuts_nothing(recipe: str) -> None:
    ended = run("explain", recipe, "--memory")
    assert ended.code == 0
    title, _, *rows = table(ended.out)
    assert "…" not in ended.out
    assert title.startswith("memory per rank in ")
    assert max(map(len, rows[: rows.index("") if "" in rows else -2])) <= 100
    heads = "ranks stage flight layer param grad master Adam activ buffer temp host need device"
    assert rows[0].split() == heads.split()


def test_ranks_that_are_alike_share_a_row() -> None:
    shown = "\n".join(table(run("explain", C2, "--memory").out))
    for ranks in ("0-3", "4-7", "16-19", "28-29", "30"):
        assert f"\n {ranks} " in shown or f"\n{ranks} " in shown
    assert "need" in shown
    assert "!" not in shown


def test_the_json_has_every_part_of_every_rank() -> None:
    found = explained(C2)
    assert found["fits"] is True
    assert [each["rank"] for each in found["memory"]] == list(range(31))
    for each in found["memory"]:
        assert each["need"] == sum(each[part] for part in PARTS)
        assert each["fits"]
        assert each["capacity"] == 97871 * 2**20
        assert each["device"] == "h20"
    last = found["memory"][30]
    assert (last["pipeline"], last["stage"], last["in_flight"]) == (1, 4, [1])
    assert list(last["activations_by_layer"]) == ["56", "57", "58", "59"]
    assert "memory" not in json.loads(run("explain", C2, "--json").out)


def test_one_rank_may_be_asked_for() -> None:
    assert [each["rank"] for each in explained(C2, "--rank", "28")["memory"]] == [28]


def test_a_device_that_is_too_small_is_marked_and_told_what_would_help() -> None:
    ended = run("explain", C1, "--memory", *ON_CPU)
    assert ended.code == 0, "it is a finding, not a failure"
    lines = table(ended.out)
    marked = [line for line in lines if "!" in line and "cpu 4.0" in line]
    assert len(marked) == 4
    (verdict,) = [line for line in lines if line.startswith("ranks 0-3, 16-19 need 82.4 GiB, ")]
    assert "but a device of kind cpu has 4.0 GiB: " in verdict
    for change in ("recompute: full frees ", "zero: 1 frees ", "micro_batch_size: 1 frees "):
        assert change in verdict
    found = explained(C1, *ON_CPU)
    assert found["fits"] is False
    assert not any(each["fits"] for each in found["memory"])
    assert {"change", "frees"} == set(found["memory"][0]["remedies"][0])


def test_recompute_and_offload_show_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    path = str(tmp_path / "small.yaml")
    plain, full = (
        explained(path, f"strategy={{tp: 2, pp: 1, micro_batches: 3, recompute: {kind}}}")["memory"][0]
        for kind in ("none", "full")
    )
    assert full["activations"] < plain["activations"]
    moved = explained(path, "strategy={tp: 2, micro_batches: 3, offload: true}", "training.seq_length=4096")
    assert moved["memory"][0]["host"] > 0


def test_ranges_of_ranks_that_share_a_row_stand_one_below_the_other() -> None:
    path = str(Path(C1).parent / "table9_32b_16h800_32h20.yaml")
    rows = [line.split() for line in run("explain", path, "--memory").out.splitlines()]
    (first,) = [place for place, row in enumerate(rows) if row[:3] == ["16-19", "0", "3"]]
    assert rows[first + 1 : first + 4] == [["24-27"], ["32-35"], ["40-43"]]
