"""Documents over the pipelines of the strategy that each step takes, of several in one run (paper A.1, scenario c)."""

from collections.abc import Sequence
from typing import Protocol

from hetero_megatron.data.document_dispatch import DispatchReport
from hetero_megatron.data.packing import Numbers, Share, pieces_of, units_of
from hetero_megatron.data.samples import Samples
from hetero_megatron.data.steps import StepSamples


class Chosen(Protocol):
    """What was chosen for a step: a strategy's number, the documents of its micro-batches, how they are shared."""

    @property
    def strategy(self) -> int:
        """The number of the strategy."""
        ...

    @property
    def pipelines(self) -> Numbers:
        """Per pipeline and micro-batch, the numbers of the documents."""
        ...

    @property
    def report(self) -> DispatchReport:
        """How well they are shared."""
        ...


class Chooser(Protocol):
    """Who chooses: the same for the same lengths, wherever it runs."""

    def choose_many(self, steps: Sequence[Sequence[int]], before: int | None = None) -> Sequence[Chosen]:
        """For consecutive steps with documents of these lengths, after a step of strategy `before`."""
        ...


class StrategyPacking:
    """Documents shared by a chooser, `lookahead` steps at a time, so that a switch pays for the steps behind it too."""

    def __init__(self, samples: Samples, seq_length: int, chooser: Chooser, lookahead: int = 8) -> None:
        """Check that a document of seq_length tokens finds a place.

        Raises:
            HeteroError: it fits into no strategy.
        """
        self.samples, self.seq_length, self.chooser, self.lookahead = samples, seq_length, chooser, lookahead
        self._shares: dict[int, Share] = {}
        self._last: int | None = None
        chooser.choose_many([[seq_length]])

    def decide(self, steps: Sequence[StepSamples]) -> None:
        """Choose for consecutive steps, which follow those of the call before."""
        pieces = [pieces_of(self.samples, step, self.seq_length) for step in steps]
        found = self.chooser.choose_many([sizes for _, sizes in pieces], self._last)
        self._shares = {
            step.iteration: Share(
                units_of(chosen.pipelines, units), chosen.report, chosen.strategy, tuple(sizes)
            )
            for step, (units, sizes), chosen in zip(steps, pieces, found, strict=True)
        }
        self._last = found[-1].strategy

    def share(self, step: StepSamples) -> Share:
        """The step's documents over the pipelines of its strategy; one that was not decided on is, by itself."""
        if step.iteration not in self._shares:
            self.decide([step])
        return self._shares[step.iteration]
