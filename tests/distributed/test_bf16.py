"""BF16 compute with FP32 master weights, FP32 gradients and FP32 moments (DESIGN decision 5, §7)."""

import pytest
import torch

from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import view
from tests.distributed.training import (
    alter_gradients,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

BF16_LOSS_RTOL = 2e-2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bf16_run_learns_like_the_fp32_model_of_one_device(sequence_parallel: bool) -> None:
    steps = [sequences(4)] * 12
    found = train(het4(sequence_parallel=sequence_parallel), steps, dtype=torch.bfloat16)
    wanted = reference(steps)
    assert wanted.losses[-1] < 0.5 * wanted.losses[0], "it learns, so that equal losses mean something"
    assert found.losses == pytest.approx(wanted.losses, rel=BF16_LOSS_RTOL, abs=0)
    assert not any(result.skipped for result in found.results)
    # `train` found every copy of every FP32 master weight and moment bit-equal.
    for name, tensors in found.tensors.items():
        assert torch.equal(tensors["parameter"], tensors["master"].bfloat16().float()), name


def test_updates_below_bf16_resolution_add_up_in_the_master_weights() -> None:
    """1 - 5e-4 is 1 in BF16 (its neighbour is 0.99609375), and four such steps are not."""
    settings = OptimizerSettings(name="sgd", lr=5e-4)
    norms: list[tuple[float, float]] = []

    def ones(session: Session) -> None:
        alter_gradients(session, lambda slot, gradient, divisor: gradient.fill_(divisor))

    def look(session: Session, step: int) -> None:
        slot = next((s for s in session.state.slots if s.name.endswith("norm.weight")), None)
        assert slot is not None
        values = (view(flat, slot) for flat in (session.state.master, session.state.compute))
        norms.append(tuple(float(value[0]) for value in values))

    plan = strategy((2, 1, [stage("0-1", "0-2"), stage("2", "3")]), (2, 1, [stage("3", "0-3")]))
    found = train(
        plan,
        [sequences(4)] * 5,
        settings=settings,
        dtype=torch.bfloat16,
        prepare=ones,
        before_step=look,
        collect=lambda session: norms,
    )
    for rank, seen in found.extra.items():
        masters, computed = zip(*seen, strict=True)
        assert masters == pytest.approx([1.0, 0.9995, 0.999, 0.9985, 0.998], abs=1e-6), f"rank {rank}"
        assert computed == (1.0, 1.0, 1.0, 1.0, 0.99609375), f"rank {rank}"
