"""The benchmark of the data path measures the runs it says."""

from pathlib import Path

import pytest

from benchmarks.data import PACKINGS, loader_of, prepared, report, run_of


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_data_path_of_the_quickstart_is_measured(packing: str, tmp_path: Path) -> None:
    run = run_of(packing, 0, str(tmp_path))
    assert run.data.section.packing == packing
    loader = loader_of(run)
    assert prepared(loader, 0.05) > 0
    assert loader.position.iteration > 0


def test_ratios_and_waits_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report({"model": [100.0], "rows": [4000.0, 6000.0]}, {("rows", 1): [(0.002, 0.01)]})
    out = capsys.readouterr().out
    assert "5,000 tokens/s on one core (median of 2, 4,000 to 6,000), 50 times what the model consumes" in out
    assert "rows       workers 1: a step waits 2.00 ms for its data, 1.00% of the time" in out
