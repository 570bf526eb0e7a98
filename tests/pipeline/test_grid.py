"""The printed time grid (paper Figure 21, right)."""

from hetero_megatron.pipeline.grid import grid, render
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.schedule import gpipe, interleaved, one_f_one_b


def test_two_pipelines_are_printed_aligned_in_time() -> None:
    assert grid([lower(one_f_one_b(3, 3)), lower(gpipe(1, 1))]) == (
        "pipeline 0: 3 stages, 3 micro-batches, bubble 40%\n"
        "stage 0 | F0 F1 F2 .  .  .  .  B0 == .  B1 == .  B2 ==\n"
        "stage 1 | .  F0 F1 .  .  B0 == F2 B1 == .  B2 == .  .\n"
        "stage 2 | .  .  F0 B0 == F1 B1 == F2 B2 == .  .  .  .\n"
        "pipeline 1: 1 stage, 1 micro-batch, bubble 0%\n"
        "stage 0 | F0 B0 =="
    )


def test_a_backward_may_take_one_tick() -> None:
    assert grid([lower(one_f_one_b(2, 2))], backward_ticks=1) == (
        "pipeline 0: 2 stages, 2 micro-batches, bubble 33%\n"
        "stage 0 | F0 F1 .  B0 .  B1\n"
        "stage 1 | .  F0 B0 F1 B1 ."
    )


def test_a_pipeline_without_work_has_empty_rows() -> None:
    assert grid([lower(gpipe(2, 0))]) == "pipeline 0: 2 stages, 0 micro-batches\nstage 0 |\nstage 1 |"


def test_columns_are_as_wide_as_the_longest_action() -> None:
    rows = grid([lower(gpipe(1, 11))]).splitlines()
    assert rows[1].startswith("stage 0 | F0  F1  F2 ")
    assert "B10 ===" in rows[1]


def test_stage_numbers_are_aligned_and_remarks_follow() -> None:
    lines = render([[] for _ in range(11)], ["stop"]).splitlines()
    assert lines[0] == "stage  0 |  stop"
    assert lines[10] == "stage 10 |"


def test_the_chunks_of_an_interleaved_pipeline_are_told_apart() -> None:
    assert grid([lower(interleaved(2, 2, 2))], backward_ticks=1) == (
        "pipeline 0: 2 stages of 2 chunks, 2 micro-batches, bubble 20%\n"
        "stage 0 | F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1\n"
        "stage 1 | .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   ."
    )
