"""Cases O-65, O-67 and O-68: a rank dies or stops at any time; who is left says which, and goes on with the same samples."""

from dataclasses import replace

import pytest
import torch

from hetero_megatron.runtime.faults import Fault
from hetero_megatron.runtime.supervisor import Limits
from tests.distributed.surviving import survive
from tests.distributed.training import (
    ADAM,
    T0,
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
)

DATA = tuple(sequences(4, seed=step) for step in range(6))


@pytest.mark.parametrize("phase", ["between two steps", "forward", "gradient sync", "saving"])
def test_o65_survivors_name_rank_1_go_on_and_may_be_started_again(
    phase: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """(a) before its groups were used, (b) in a forward pass, (c) in gradient synchronisation, (d) while saving."""
    fault = Fault("kill", 1, 1 if phase == "between two steps" else 2, phase, 2 if phase == "saving" else 1)
    found = survive(het4(zero=1), DATA[:3], [fault], timeout_s=30, copies=True, saving=phase == "saving")
    assert (found.saved[-1:], found.unsaved) == ([3] if phase == "saving" else [], [])
    assert found.code == 0
    assert_parity(found.outcome, reference(DATA[:3]))
    for recoveries in found.recoveries.values():
        assert "rank 1 was killed by SIGKILL" in str(recoveries[0])
        assert "noticed by rank" in str(recoveries[0])
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_o65_a_stopped_rank_is_found_within_its_time_limit() -> None:
    found = survive(
        het4(), DATA[:3], [Fault("stop", 1, 2, "backward")], limits=Limits(heartbeat_s=1.0), timeout_s=30
    )
    assert found.code == 0
    assert_parity(found.outcome, reference(DATA[:3]))
    assert "rank 1 has shown no sign of life" in str(found.recoveries[0][0])


@pytest.mark.parametrize("zero", [0, 1])
def test_o67_a_pipeline_is_lost_in_a_backward_pass_and_every_step_keeps_its_samples(zero: int) -> None:
    """P1 is gone in step 3, comes back before step 6, and has weights, moments and step again."""

    def wait(elastic, iteration: int) -> None:  # type: ignore[no-untyped-def]
        if iteration == 6 and not elastic.recoveries[-1].view.joined:
            while not elastic.member.is_awaited():
                pass
            elastic.stop_for_joining()

    plan = replace(het4((2, 1), (2, 1)), zero=zero)
    found = survive(
        plan, DATA, [Fault("kill", 3, 3, "backward")], in_step=wait, returning=True, copies=bool(zero)
    )
    assert found.code == 0
    assert sorted(found.pids) == [0, 1, 2, 3]
    assert [recovery.iteration for recovery in found.recoveries[0]] == [2, 5]
    assert [result.valid_tokens for result in found.outcome.results] == [60] * 6
    assert_parity(found.outcome, reference(DATA))


@pytest.mark.parametrize("zero", [0, 1])
def test_o68_a_replica_goes_on_with_a_rank_less_in_its_tensor_parallel_group(zero: int) -> None:
    """R1 is killed after step 2: P0 becomes R0 with TP1, and a vocabulary of 97 makes all cuts unequal."""
    config, settings = replace(T0, vocab_size=97), replace(ADAM, lr=1e-3)
    steps = [sequences(4, vocab=97, seed=step) for step in range(5)]
    plan = strategy((1, 2, [stage("0-1", "0-3")]), (1, 2, [stage("2-3", "0-3")]), zero=zero)
    fault = Fault("kill", 1, 3, "between two steps")
    found = survive(plan, steps, [fault], config, settings, copies=bool(zero))
    assert found.code == 0
    assert found.pids == {rank: pid for rank, pid in found.first_pids.items() if rank != 1}
    assert_parity(found.outcome, reference(steps, config, settings))
    after = {rank: own["embedding.weight"]["parameter"] for rank, own in found.outcome.shards.items()}
    assert torch.equal(after[0], torch.cat([after[2], after[3]])), "replicas are bit-equal"
