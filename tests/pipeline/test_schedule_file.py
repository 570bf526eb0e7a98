"""Schedules as CSV files: round trip, and what is refused with file and line."""

import pytest

from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.schedule import Tasks, gpipe, interleaved, one_f_one_b
from hetero_megatron.pipeline.schedule_file import read_csv, write_csv

HEAD = "pipeline,stage,actions\n"


def test_a_file_has_a_row_per_stage() -> None:
    assert write_csv([interleaved(2, 1, 2), gpipe(1, 2)]) == (
        "pipeline,stage,actions\n0,0,F0,F0.1,B0.1,B0\n0,1,F0,F0.1,B0.1,B0\n1,0,F0,F1,B0,B1\n"
    )


@pytest.mark.parametrize(
    "pipelines",
    [
        [one_f_one_b(3, 5)],
        [interleaved(3, 7, 4), one_f_one_b(1, 3), interleaved(2, 0, 2), gpipe(4, 2)],
    ],
)
def test_what_is_written_reads_back(pipelines: list[Tasks]) -> None:
    assert read_csv(write_csv(pipelines), "a.csv") == tuple(pipelines)


def test_a_spreadsheet_may_pad_rows_and_leave_idle_cells_empty() -> None:
    text = "\ufeffpipeline,stage,actions,,,\r\n0,0,F0,,,B0\r\n0,1,,F0 ,B0,\r\n,,,,,\r\n"
    assert read_csv(text, "a.csv") == (one_f_one_b(2, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a.csv line 1 is ''; the first line must be 'pipeline,stage,actions'"),
        ("0,0,F0,B0\n", r"a.csv line 1 is '0,0,F0,B0'; the first line must be"),
        (HEAD, "a.csv holds no pipeline; write a row for every stage"),
        (HEAD + "0,0,F0,W0,B0\n", "a.csv line 2: 'W0' is no action: write one of F, B"),
        (HEAD + "0,0,F0,SEND_F0,B0\n", "a.csv line 2: SEND_F0 communicates; write F and B only"),
        (
            HEAD + "0,0,F0,B0\n\n0,2,F0,B0\n",
            "a.csv line 4 is for pipeline '0' stage '2', where pipeline 0 stage 1 or pipeline 1 stage 0 is expected",
        ),
        (
            HEAD + "0,1,F0,B0\n",
            "a.csv line 2 is for pipeline '0' stage '1', where pipeline 0 stage 0 is expected",
        ),
        (HEAD + "0\n", "a.csv line 2 is for pipeline '0' stage ''"),
        (
            HEAD + "0,0,F0,B0\n0,0,F0,B0\n",
            "line 3 is for pipeline '0' stage '0', where pipeline 0 stage 1 or",
        ),
        (HEAD + "0,0,F0,F1,B0\n", "a.csv line 2: pipeline 0 stage 0 has no B1; .* micro-batches 0 to 1$"),
        (HEAD + "0,0,F0,B0,F1,B1\n0,1,F0,B0\n", "a.csv line 3: pipeline 0 stage 1 has no F1; every stage of"),
        (HEAD + "0,0,F0,B0\n1,0,F1,B1\n", "a.csv line 3: pipeline 1 stage 0 has no F0"),
        (
            HEAD + "0,0,F0,F0.1,B0.1,B0\n0,1,F0,B0\n",
            "line 3: pipeline 0 stage 1 has no F0.1; .* micro-batches 0 to 0 in chunks 0 to 1",
        ),
        (HEAD + "0,0,F0,B0,F0\n", "a.csv line 2: pipeline 0 stage 0 has F0 twice; once"),
        (HEAD + "0,0,B0,F0\n", "a.csv: pipeline 0 stage 0 runs B0 before F0"),
        (
            HEAD + "0,0,F0,F0.1,B0.1,B0\n0,1,F0.1,F0,B0.1,B0\n",
            "a.csv: pipeline 0: deadlock: stage 0 waits for F0.1 from stage 1",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_csv(text, "a.csv")
