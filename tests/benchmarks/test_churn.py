"""The churn benchmark: its arithmetic, and that it runs on a small trace."""

from pathlib import Path

import pytest

from benchmarks import churn
from hetero_megatron.planner.churn import Change, Ranks

TRACE = "".join(f"0,add,m{n}\n" for n in range(4)) + "1800000,remove,m3\n3600000,add,m4\n"


def test_capacity_is_what_those_present_could_do() -> None:
    """Rank 1 is twice as fast and there for half of the time: (1 x 100 + 2 x 50) / (3 x 100)."""
    changes = (Change(0.0, joined=Ranks({0, 1})), Change(50.0, lost=Ranks({1})))
    assert churn.capacity(changes, 100.0, {0: 1.0, 1: 2.0}) == pytest.approx(2 / 3)


def test_clusters_are_read_from_text() -> None:
    found = churn.cluster_of("h800:2+h20:4")
    assert [found.kind(rank).name for rank in (0, 15, 16, 47)] == ["h800", "h800", "h20", "h20"]


def test_it_prints_a_row_per_policy_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.csv").write_text(TRACE)
    command = [str(tmp_path / "small.csv"), "--clusters", "h20:4", "--loses", "node", "--processes", "1"]
    picture = tmp_path / "churn.png"
    monkeypatch.setattr("sys.argv", ["churn", *command, "--png", str(picture)])
    churn.main()
    shown = capsys.readouterr().out
    assert "h20:4, small, 1.0 h, a loss takes a node" in shown
    for name in churn.COLOURS:
        assert shown.count(name) >= 2
    assert picture.stat().st_size > 10_000
