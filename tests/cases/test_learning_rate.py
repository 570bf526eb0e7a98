"""The rate goes by the number of the step, whatever happens in between (case O-63, as far as one run shows it)."""

from itertools import pairwise

import pytest
from torch import Tensor

from hetero_megatron.runtime.learning_rate import learning_rate
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from tests.distributed.training import alter_gradients, sequences, stage, strategy, train

SETTINGS = OptimizerSettings(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=4, train_iters=20)
SKIPPED = 5


def test_a_skipped_step_counts_in_the_schedule_on_every_rank_and_in_every_group() -> None:
    """SGD on a gradient of all ones moves a weight by the rate of the step; a matrix, which is decayed, by a bit more."""
    values: list[list[float]] = []

    def spoil(session: Session) -> None:
        def ones(slot: ParameterSlot, gradient: Tensor, divisor: float) -> None:
            gradient.fill_(float("nan") if session.iteration == SKIPPED - 1 else divisor)

        alter_gradients(session, ones)

    def look(session: Session, step: int) -> None:
        norm = next(slot for slot in session.state.slots if slot.name == "final_norm.weight")
        matrix = next(slot for slot in session.state.slots if slot.name == "head.weight")
        values.append([float(session.state.master[slot.offset]) for slot in (norm, matrix)])

    plan = strategy((1, 1, [stage("0", "0-3")]), (1, 1, [stage("1", "0-3")]))
    settings = OptimizerSettings(**{**SETTINGS.to_json(), "name": "sgd", "weight_decay": 0.1})
    found = train(
        plan,
        [sequences(2)] * 12,
        settings=settings,
        prepare=spoil,
        before_step=look,
        collect=lambda _: values,
    )
    wanted = [learning_rate(SETTINGS, step) for step in range(1, 13)]
    assert [result.lr for result in found.results] == wanted
    assert wanted[9:11] == pytest.approx([7.2221e-4, 6.3779e-4], rel=1e-5)
    assert [bool(result.skipped) for result in found.results] == [step == SKIPPED for step in range(1, 13)]
    rates = [0.0 if step == SKIPPED else rate for step, rate in enumerate(wanted, 1)]
    for seen in found.extra.values():
        for group, decay in zip(zip(*seen, strict=True), (0.0, 0.1), strict=True):
            for rate, (before, after) in zip(rates, pairwise(group), strict=False):
                assert before - after == pytest.approx(rate * (1 + decay * before), abs=2e-7)
