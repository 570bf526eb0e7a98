"""Loss spikes are noted once each, and too many steps without an update end a run."""

import json
import random
from collections.abc import Iterable

import pytest

from hetero_megatron.errors import RecipeError
from hetero_megatron.runtime.session import StepResult
from hetero_megatron.watch import FEWEST, WINDOW, SkipWatch, SpikeWatch


def step(iteration: int, loss: float, skipped: str = "", valid_tokens: int = 100) -> StepResult:
    return StepResult(iteration, loss, 1.0, 1e-3, valid_tokens, skipped, {"step": 1.0})


def notes(watch: SpikeWatch, losses: Iterable[float], first: int = 1) -> list[str]:
    found = [watch.add(step(iteration, loss)) for iteration, loss in enumerate(losses, first)]
    return [note for note in found if note]


def test_a_spike_is_noted_once_with_its_samples() -> None:
    watch = SpikeWatch(1.5)
    assert notes(watch, [2.7] * 100) == []
    assert watch.add(step(101, 5.1), (800, 807)) == (
        "loss spike at iteration 101: 5.1, 1.9 times the running median 2.7 (samples 800-807)"
    )
    assert notes(watch, [6.0, 4.2, 2.9, 2.8], 102) == []
    assert notes(watch, [4.1], 106) == ["loss spike at iteration 106: 4.1, 1.5 times the running median 2.7"]


def test_the_first_steps_are_never_a_spike() -> None:
    assert notes(SpikeWatch(1.1), [5.5, 50.0, 3.0, 30.0] * (FEWEST // 4)) == []


def test_noise_and_a_falling_loss_are_no_spike() -> None:
    noise = random.Random(0)
    losses = [10 * 0.99**at + 1 + noise.uniform(-0.3, 0.3) for at in range(500)]
    assert notes(SpikeWatch(1.5), losses) == []


def test_losses_that_are_not_finite_and_steps_without_targets_are_passed_over() -> None:
    watch = SpikeWatch(1.5)
    notes(watch, [2.0] * 20)
    before = watch.to_json()
    assert notes(watch, [float("nan"), float("inf")]) == []
    assert watch.add(step(23, 0.0, "0 tokens", valid_tokens=0)) is None
    assert watch.to_json() == before


def test_a_level_that_stays_is_noted_once_and_becomes_usual() -> None:
    watch = SpikeWatch(1.5)
    notes(watch, [2.0] * WINDOW)
    assert len(notes(watch, [4.0] * 200)) == 1
    assert watch.add(step(900, 4.0)) is None


def test_a_watch_that_was_saved_goes_on_as_if_nothing_had_happened() -> None:
    noise = random.Random(1)
    losses = [2 + noise.random() + 3 * (noise.random() < 0.05) for _ in range(300)]
    whole = notes(SpikeWatch(1.5), losses)
    assert len(whole) > 5
    for stop in (0, 1, 10, 100, 217, 300):
        first = SpikeWatch(1.5)
        early = notes(first, losses[:stop])
        resumed = SpikeWatch.from_json(1.5, json.loads(json.dumps(first.to_json())))
        assert early + notes(resumed, losses[stop:], stop + 1) == whole


@pytest.mark.parametrize("saved", [{}, {"losses": [1.0]}, {"losses": ["1"], "above": False}, {"losses": 3}])
def test_a_saved_watch_that_cannot_be_read_is_refused(saved: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="saved losses of the spike watch cannot be read"):
        SpikeWatch.from_json(1.5, saved)


def test_skipped_steps_in_a_row_end_the_run() -> None:
    watch, bad = SkipWatch(3), "gradient not finite on rank 2 (layers.3.wq.weight)"
    assert [watch.add(step(n, 1.0, bad)) for n in (1, 2)] == [None, None]
    assert watch.add(step(3, 1.0)) is None
    assert [watch.add(step(n, 1.0, bad)) for n in (4, 5)] == [None, None]
    assert watch.add(step(6, 0.0, "0 tokens: nothing to predict in this step", valid_tokens=0)) is None
    assert watch.count == 2
    message = SkipWatch(3, watch.count).add(step(7, float("nan"), bad))
    assert message == (
        "iteration 7: 3 steps in a row made no update (training.nonfinite_limit 3), the last because gradient not "
        "finite on rank 2 (layers.3.wq.weight); lower training.lr, or go on from an earlier checkpoint "
        "(checkpoint.resume)"
    )
    assert (SkipWatch(1).add(step(1, 1.0, bad)) or "").startswith("iteration 1: step made no update")
