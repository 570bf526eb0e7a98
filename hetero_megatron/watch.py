"""What a run notices about its own losses: a spike, and too many steps in a row without an update.

Both see the same numbers on every rank, and go on after a stop from what `to_json` gave.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from hetero_megatron.errors import RecipeError
from hetero_megatron.runtime.session import StepResult

WINDOW, FEWEST = 64, 16
"""The running median is that of so many losses at most; with fewer than so many, nothing counts as a spike."""


class SpikeWatch:
    """Notes a loss of more than `factor` times the median of the losses before it, once until it has come down.

    A median does not follow a single spike, and no spike is seen in the first steps, while losses are still few.
    Losses that are not finite, and steps without targets, are passed over.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._above = False

    def add(self, result: StepResult, samples: tuple[int, int] | None = None) -> str | None:
        """One more step: a note when a spike begins. `samples` are the first and the last sample of the step.

        `loss spike at iteration 101: 5.1, 1.9 times the running median 2.7 (samples 800-807)`
        """
        loss = result.loss
        if not math.isfinite(loss) or not result.valid_tokens:
            return None
        usual = median(self._losses) if len(self._losses) >= FEWEST else math.inf
        self._losses.append(loss)
        above, was_above = loss > self.factor * usual > 0, self._above
        self._above = above
        if not above or was_above:
            return None
        where = f" (samples {samples[0]}-{samples[1]})" if samples else ""
        return (
            f"loss spike at iteration {result.iteration}: {loss:.4g}, {loss / usual:.1f} times the running median "
            f"{usual:.4g}{where}"
        )

    def to_json(self) -> dict[str, object]:
        """The latest losses, and whether the last one was above."""
        return {"losses": list(self._losses), "above": self._above}

    @staticmethod
    def from_json(factor: float, saved: Mapping[str, object]) -> "SpikeWatch":
        """The watch that goes on where `saved` was taken.

        Raises:
            RecipeError: `saved` is not what `to_json` gives.
        """
        losses, above = saved.get("losses"), saved.get("above")
        if (
            not isinstance(losses, list)
            or not all(isinstance(loss, float) for loss in losses)
            or not isinstance(above, bool)
        ):
            raise RecipeError(f"saved losses of the spike watch cannot be read: {str(dict(saved))[:80]}")
        watch = SpikeWatch(factor)
        watch._losses.extend(losses)
        watch._above = above
        return watch


class SkipWatch:
    """Counts steps in a row that made no update because something was not finite (`training.nonfinite_limit`)."""

    def __init__(self, limit: int, count: int = 0) -> None:
        self.limit, self.count = limit, count

    def add(self, result: StepResult) -> str | None:
        """One more step: why the run must end, once `limit` steps in a row made no update.

        A step without targets makes no update either; it neither counts nor interrupts.
        """
        if not result.valid_tokens:
            return None
        self.count = self.count + 1 if result.skipped else 0
        if self.count < self.limit:
            return None
        steps = "step" if self.count == 1 else f"{self.count} steps in a row"
        return (
            f"iteration {result.iteration}: {steps} made no update (training.nonfinite_limit {self.limit}), the last "
            f"because {result.skipped}; lower training.lr, or go on from an earlier checkpoint (checkpoint.resume)"
        )
