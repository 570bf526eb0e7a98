"""How the training loop ends: what is saved when a step is refused (loop.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetero_megatron.data.loader import LoadedStep, Loader
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import StepSamples
from hetero_megatron.errors import CheckpointError, RuntimeFailure
from hetero_megatron.loop import Loop, Memory
from hetero_megatron.recipe_sections import CheckpointSection
from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.watch import SkipWatch, SpikeWatch

BAD = "gradient not finite on rank 2 (layers.3.wq.weight)"


@dataclass
class Trained:
    """A session whose steps 3 to 5 are not finite, and that saves what it is told to; two samples a step."""

    iteration: int = 0
    skipped_iterations: int = 0
    at: int = 0
    saved: list[tuple[int, int, int]] = field(default_factory=list)
    finished: int = 0
    fails: bool = False
    world = SimpleNamespace(device="cpu")

    @property
    def position(self) -> DataPosition:
        return DataPosition(self.at, 2 * self.at)

    def next(self, device: object) -> LoadedStep:
        self.at += 1
        return LoadedStep([], StepSamples(self.at - 1, 2 * self.at - 2, 2), self.position, 0.0, 8, 0)

    def step(self, batches: object, skip_nonfinite: bool, votes: tuple[float, ...]) -> StepResult:
        self.iteration += 1
        skipped = BAD if 3 <= self.iteration <= 5 else ""
        self.skipped_iterations += bool(skipped)
        return StepResult(self.iteration, 2.0, 1.0, 1e-3, 8, skipped, {"step": 1.0}, votes)

    def take_back(self) -> None:
        Session.take_back(cast(Session, self))

    def votes(self) -> tuple[float, float]:
        return 0.0, 0.0

    def settle(self, votes: object) -> None:
        """Nothing is under way."""

    def start(self, iteration: int, payload: Mapping[str, Any]) -> None:
        self.saved.append((iteration, payload["position"], self.skipped_iterations))

    def finish(self) -> Saved | Failed:
        self.finished += 1
        return (
            Failed(self.iteration, Path("x"), "disk full") if self.fails else Saved(self.iteration, Path("x"))
        )


def loop(trained: Trained, skip: bool, limit: int = 10) -> Loop:
    return Loop(
        cast(Session, trained),
        cast(Loader, trained),
        cast(Saver, trained),
        StopRequest(),
        7,
        skip,
        Memory(SpikeWatch(1.5), SkipWatch(limit)),
        {},
        lambda *told: None,
        CheckpointSection(),
    )


def test_a_run_that_stops_at_a_step_that_is_not_finite_keeps_the_state_before_it() -> None:
    trained = Trained()
    with pytest.raises(RuntimeFailure) as caught:
        loop(trained, skip=False).run()
    assert str(caught.value) == (
        f"iteration 3: {BAD}; no rank has updated its weights. Lower training.lr, or pass over such steps with "
        "training.nonfinite: skip"
    )
    assert trained.saved == [(2, 4, 0)], "iteration, sample, skipped: as if the step had not been tried"
    assert trained.finished == 1


def test_a_first_step_that_is_not_finite_leaves_no_checkpoint() -> None:
    trained = Trained(iteration=2)
    trained.step = lambda *rest: StepResult(1, 2.0, 1.0, 1e-3, 8, BAD, {}, (0.0,))  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match="iteration 1: gradient not finite"):
        loop(trained, skip=False).run()
    assert trained.saved == []


def test_a_run_that_skips_too_many_steps_is_saved_where_it_ends() -> None:
    trained = Trained()
    with pytest.raises(RuntimeFailure, match=r"iteration 4: 2 steps in a row made no update"):
        loop(trained, skip=True, limit=2).run()
    assert trained.saved == [(4, 8, 2)]


def test_a_run_that_skips_goes_on_and_fails_only_if_it_cannot_be_saved() -> None:
    trained = Trained()
    assert loop(trained, skip=True).run() == ""
    assert trained.saved == [(7, 14, 3)]
    with pytest.raises(CheckpointError, match="the run ends without its last checkpoint: disk full"):
        loop(Trained(fails=True), skip=True).run()
