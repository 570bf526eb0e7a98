"""Which consecutive samples each step takes, until the epochs are over (paper §8, data)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.samples import DataPosition, Samples
from hetero_megatron.errors import DataError

PackingKind = Literal["rows", "documents"]
LastBatch = Literal["keep", "drop"]
# Lengths are asked for in windows: of a pass, but no more than the first number; of a stream, which has to be read
# for them, of the second.
WINDOW, SMALL_WINDOW = 1 << 16, 32


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples [first, first + count) of step `iteration`, counted from 0."""

    iteration: int
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """The samples' numbers."""
        return range(self.first, self.first + self.count)


class Steps:
    """The steps of a run; what a step takes follows from its position alone, not from any strategy.

    Under `rows` a step takes `global_batch_size` rows; under `documents` as many consecutive samples as fit into
    global_batch_size * seq_length tokens, and at least one. With `epochs` the steps end after as many passes; the
    step there that is not full is kept or dropped.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch_size: int,
        seq_length: int,
        packing: PackingKind,
        epochs: float | None = None,
        last_batch: LastBatch = "keep",
    ) -> None:
        """Nothing is read, but that epochs of a stream are counted by going through it once.

        Raises:
            DataError: a step or the epochs would be empty, all steps would be dropped, or rows of a stream.
        """
        if global_batch_size < 1 or seq_length < 1:
            raise DataError(
                f"global_batch_size {global_batch_size} and seq_length {seq_length} must be positive"
            )
        if packing == "rows" and samples.per_pass is None:
            raise DataError(
                "packing: rows needs documents whose lengths are known, and a stream has none; use packing: documents, "
                "or prepare the data (hetero-megatron data prepare) and leave out stream"
            )
        self.samples, self.packing = samples, packing
        self.global_batch_size, self.seq_length, self.last_batch = global_batch_size, seq_length, last_batch
        self.epochs = epochs
        self._ends: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._window = 0
        self.total = None if epochs is None else self._total(epochs)
        if self.total is not None and self.at(DataPosition()) is None:
            raise DataError(
                f"{epochs:g} epochs are {self.total} samples, less than one step; with last_batch: drop nothing "
                "is left to train on; keep it, or make global_batch_size smaller"
            )

    def at(self, position: DataPosition) -> StepSamples | None:
        """The step at `position`, or None when the epochs are over."""
        first = position.sample
        if self.packing == "rows":
            count, full = self.global_batch_size, True
            if self.total is not None:
                count = min(count, self.total - first)
                full = count == self.global_batch_size
        else:
            count, full = self._documents(first)
        if count <= 0 or not (full or self.last_batch == "keep"):
            return None
        return StepSamples(position.iteration, first, count)

    def after(self, step: StepSamples) -> DataPosition:
        """Where the run stands when `step` is done."""
        return DataPosition(step.iteration + 1, step.first + step.count)

    def count(self) -> int:
        """How many steps the epochs take.

        Raises:
            DataError: there are no epochs, or the samples are a stream, which would have to be read for it.
        """
        if self.total is None:
            raise DataError("without train_epochs there is no last step; give train_iters")
        if self.samples.per_pass is None:
            raise DataError(
                "how many steps an epoch of a stream takes is not known before it was read; give train_iters"
            )
        if self.packing == "rows":
            full, rest = divmod(self.total, self.global_batch_size)
            return full + (rest > 0 and self.last_batch == "keep")
        position, found = DataPosition(), 0
        while (step := self.at(position)) is not None:
            position, found = self.after(step), found + 1
        return found

    def _total(self, epochs: float) -> int:
        if epochs <= 0:
            raise DataError(f"train_epochs is {epochs:g}; it must be positive")
        return max(1, round(epochs * self.samples.count_pass()))

    def _documents(self, first: int) -> tuple[int, bool]:
        """How many samples fit into a step from `first` on, and whether it is full."""
        budget = self.global_batch_size * self.seq_length
        place = first - self._window
        while True:
            start = int(self._ends[place - 1]) if 0 < place <= len(self._ends) else 0
            inside = 0 <= place <= len(self._ends)
            count = int(np.searchsorted(self._ends, start + budget, side="right")) - place if inside else 0
            if inside and place + count < len(self._ends):
                return max(1, count), True
            if inside and self.total is not None and self._window + len(self._ends) >= self.total:
                used = int(self._ends[-1]) - start if len(self._ends) else 0
                return count, count > 0 and used == budget
            window = min(WINDOW, max(self.samples.per_pass or 0, SMALL_WINDOW))
            self._look(first, max(window, 2 * count))
            place = 0

    def _look(self, first: int, count: int) -> None:
        """Ask for the lengths of `count` samples from `first` on, fewer at the end of the epochs."""
        if self.total is not None:
            count = max(0, min(count, self.total - first))
        self._window, self._ends = first, np.cumsum(self.samples.lengths(first, count))
