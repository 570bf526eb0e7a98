"""The training loop of one rank: steps, evaluations, saves, and an end on which all ranks agree (DESIGN §6).

Ranks agree inside the step itself: whether one of them was asked to stop, and how far its save is, are votes that
travel with the step's own numbers. So every rank leaves the loop after the same step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.data.loader import LoadedStep, Loader
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import CheckpointError, RuntimeFailure
from hetero_megatron.recipe_sections import CheckpointSection, EvaluationSection
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.session import Evaluation, Session, StepResult
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.watch import SkipWatch, SpikeWatch

Told = Callable[[StepResult, LoadedStep, Evaluation | None, str | None, int], None]
"""What is done with a step's numbers: its result, its data, what was measured after it, what is worth a note, and on
how many targets the run was trained so far."""


@dataclass
class Loop:
    """What a rank needs to train until the last step, the end of the data, or a signal.

    Attributes:
        facts: what a checkpoint says besides where the run stands: recipe, settings, identity of the data.
        held_out: this rank's micro-batches of every evaluation step.
    """

    session: Session
    loader: Loader
    saver: Saver
    request: StopRequest
    train_iters: int
    skip_nonfinite: bool
    spikes: SpikeWatch
    skips: SkipWatch
    facts: Mapping[str, Any]
    told: Told
    checkpoint: CheckpointSection
    evaluation: EvaluationSection | None = None
    held_out: Sequence[Sequence[MicroBatch]] = ()
    consumed_tokens: int = 0

    def run(self) -> str:
        """Train; returns which signal ended it, or "" when training is complete.

        Whatever was trained is saved at the end, also when the end is a refusal on which all ranks agree.

        Raises:
            RuntimeFailure: a step is not finite where that is not skipped, or a peer is gone.
            DataError: a document cannot be read.
            CheckpointError: the last state could not be saved; the checkpoints before are as they were.
        """
        asked = False
        while self.session.iteration < self.train_iters and not asked:
            loaded = self.loader.next(self.session.world.device)
            if loaded is None:
                break
            votes = (float(bool(self.request)), *self.saver.votes())
            result = self.session.step(loaded.batches, self.skip_nonfinite, votes)
            asked = result.votes[0] > 0
            self.saver.settle(result.votes[1:])
            self.consumed_tokens += result.valid_tokens
            self._after(result, loaded, asked)
        ended = self._save(self.loader.position)
        ended = self.saver.finish() or ended
        if isinstance(ended, Failed):
            raise CheckpointError(f"the run ends without its last checkpoint: {ended.text}")
        return (self.request.signal or "a signal to another rank") if asked else ""

    def _after(self, result: StepResult, loaded: LoadedStep, asked: bool) -> None:
        """Notes, evaluation, save, in an order that all ranks share."""
        numbers = loaded.samples.numbers
        note = self.spikes.add(result, (numbers[0], numbers[-1]))
        measured = None
        if self.evaluation and self._is_due(self.evaluation.interval) and not asked:
            measured = self._evaluate()
        self.told(result, loaded, measured, note, self.consumed_tokens)
        refusal = self.skips.add(result)
        if self._is_due(self.checkpoint.interval) and not refusal:
            self._save(loaded.position)
        if refusal:
            self.saver.finish()
            raise RuntimeFailure(refusal)

    def _is_due(self, interval: int | None) -> bool:
        """Whether something that is done every `interval` steps, and after the last, is done now."""
        iteration = self.session.iteration
        return bool(interval) and (iteration % (interval or 1) == 0 or iteration == self.train_iters)

    def _evaluate(self) -> Evaluation:
        """The loss over all held-out micro-batches, each token with the same weight."""
        return Evaluation.of([self.session.evaluate(batches) for batches in self.held_out])

    def _save(self, position: DataPosition) -> Saved | Failed | None:
        memory = {
            "spikes": self.spikes.to_json(),
            "skips": self.skips.count,
            "consumed_tokens": self.consumed_tokens,
        }
        payload = {**self.facts, "position": position.sample, "memory": memory}
        return self.saver.start(self.session.iteration, payload)
