"""How ranks, steps and runs are written for people to read."""

import math
from pathlib import Path

import pytest

from hetero_megatron.report import RunSummary, log_line, rank_text, validation_line
from hetero_megatron.runtime.session import Evaluation, StepResult


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((4,), "R4"),
        ((0, 1), "R0-1"),
        ((0, 1, 2, 3), "R0-3"),
        ((0, 4, 8), "R0,4,8"),
        ((15, 40, 41, 42, 43), "R15,40-43"),
        ((0, 1, 4), "R0,1,4"),
        ((3, 2, 1), "R3,2,1"),
    ],
)
def test_runs_of_ranks_have_a_dash_and_the_order_stays(ranks: tuple[int, ...], text: str) -> None:
    assert rank_text(ranks) == text


SECONDS = {"step": 0.5, "compute": 0.3, "communication": 0.1, "bubble": 0.05}


def result(iteration: int, loss: float = 2.0, skipped: str = "") -> StepResult:
    return StepResult(iteration, loss, 0.25, 1e-3, 1000, skipped, SECONDS)


def test_a_log_line_is_megatron_s_with_what_a_heterogeneous_run_needs() -> None:
    assert log_line(result(7), 100, 8, 0, "TP2>TP1", consumed_samples=61, data_wait_seconds=0.0123) == (
        " iteration        7/     100 | consumed samples:           61 | elapsed time per iteration (ms): 500.0 | "
        "learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 2.000000E+00 | grad norm: 0.250 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | strategy: TP2>TP1 | tokens/s: 2000 | "
        "bubble: 10.0% | data wait (ms): 12.3 |"
    )
    plain = log_line(result(7), 100, 8, 0, "TP2>TP1")
    assert "consumed samples:           56 |" in plain
    assert "data wait" not in plain


def test_a_validation_line_is_megatron_s() -> None:
    assert validation_line(100, Evaluation(2.0, 4096)) == (
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
    )
    assert "PPL: 4.851652E+08 |" in validation_line(1, Evaluation(99.0, 1))
    assert "value: NAN | lm loss PPL: NAN |" in validation_line(1, Evaluation(math.nan, 1))


def test_a_summary_shows_validation_the_wait_for_data_and_where_a_resumed_run_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = RunSummary(10**6)
    for iteration in range(11, 14):
        summary.add(result(iteration, 3.0 - 0.1 * iteration), 0.5)
    summary.add(result(14, math.nan, "gradient not finite on rank 2"))
    summary.evaluated(12, Evaluation(1.75, 10))
    summary.evaluated(14, Evaluation(2.0, 10))
    summary.print(Path("runs/some"))
    text = capsys.readouterr().out
    assert "1.9000 -> 1.7000" in text
    assert "2.0000 (perplexity 7.39) after step 14" in text
    assert "1.7500 at best, after step 12" in text
    assert "1.5 s" in text
    assert "3 in 2.0 s, 11 to 14 " in text
    assert "1 without an update" in text
    assert text.endswith(f"files: {Path('runs/some/metrics.jsonl')}\n")


def test_a_summary_counts_the_steps_of_each_strategy_and_the_time_of_switches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = RunSummary(10**6)
    for iteration, name in enumerate(("long", "short", "short"), 1):
        summary.add(result(iteration), 0.0, name)
    summary.print(Path("runs/some"))
    assert "0 switches in 0.000 s " in capsys.readouterr().out
    summary.switched(0.2)
    summary.switched(0.3)
    summary.print(Path("runs/some"))
    text = capsys.readouterr().out
    for told in ("long: 1 steps, 0.500 s each", "short: 2 steps, 0.500 s each"):
        assert told in text
    assert "2 switches in 0.500 s, 25.0% of the time" in text


def test_a_summary_of_a_whole_run_stays_short(capsys: pytest.CaptureFixture[str]) -> None:
    summary = RunSummary(10**6)
    for iteration in (1, 2):
        summary.add(result(iteration))
    summary.print(Path("runs/some"))
    text = capsys.readouterr().out
    assert "2 in 1.0 s " in text
    assert "validation" not in text
    assert "waited" not in text
    assert "strategies" not in text
