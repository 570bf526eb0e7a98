"""The run with synchronous sends (paper A.2)."""

from hetero_megatron.pipeline.action import parse_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.dry_run import dry_run
from hetero_megatron.pipeline.lower import PipelineActions, lower
from hetero_megatron.pipeline.schedule import one_f_one_b


def test_a_good_schedule_runs_to_its_end() -> None:
    run = dry_run(lower(one_f_one_b(3, 4)))
    assert run.stuck == ()
    assert [len(cells) for cells in run.cells] == [8, 8, 8]


def test_waiting_for_a_finished_stage_is_explained() -> None:
    run = dry_run(
        PipelineActions((parse_steps("F0 {RECV_B0} B0"), parse_steps("F0 B0")), Boundaries.chain(2))
    )
    assert run.stuck == (0,)
    assert run.explain() == (
        "deadlock: stage 0 waits for B0 from stage 1, which has finished\n"
        "stage 0 | F0 .  {RECV_B0} <-- stuck here\n"
        "stage 1 | F0 B0"
    )
