"""The training loop of one rank: steps, evaluations, saves, and an end on which all ranks agree (DESIGN §6).

Ranks agree inside the step itself: whether one of them was asked to stop, and how far its save is, are votes that
travel with the step's own numbers. So every rank leaves the loop after the same step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hetero_megatron.data.loader import LoadedStep, Loader
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import CheckpointError, RuntimeFailure
from hetero_megatron.pace import Pace
from hetero_megatron.recipe_sections import CheckpointSection, EvaluationSection
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.checkpoint import Failed, Saved, Saver
from hetero_megatron.runtime.session import Evaluation, Session, StepResult
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.stragglers import Watch
from hetero_megatron.tracing import Tracer
from hetero_megatron.turns import Turns
from hetero_megatron.watch import SkipWatch, SpikeWatch

Told = Callable[[StepResult, LoadedStep, Evaluation | None, str | None, int], None]
"""What is done with a step's numbers: its result, its data, what was measured after it, what is worth a note, and on
how many targets the run was trained so far."""


@dataclass
class Memory:
    """What a loop knows besides its session: it outlives the session when ranks are lost.

    Attributes:
        opened: the data of the latest step, without its micro-batches; `result`, once it counts.
        counted: the iteration up to which losses, skips and tokens are counted; `finished`: up to which evaluations and
            saves are done as well.
        note, refusal: what there is to say of the latest counted step.
    """

    spikes: SpikeWatch
    skips: SkipWatch
    consumed_tokens: int = 0
    opened: LoadedStep | None = None
    result: StepResult | None = None
    counted: int = 0
    finished: int = 0
    note: str | None = None
    refusal: str | None = None

    def count(self, result: StepResult, loaded: LoadedStep) -> None:
        """Take a step into account, once."""
        if result.iteration <= self.counted:
            return
        numbers = loaded.samples.numbers
        self.note = self.spikes.add(result, (numbers[0], numbers[-1]))
        self.refusal = self.skips.add(result)
        self.consumed_tokens += result.valid_tokens
        self.counted = result.iteration

    def to_json(self) -> dict[str, object]:
        """What a checkpoint keeps of it."""
        return {
            "spikes": self.spikes.to_json(),
            "skips": self.skips.count,
            "consumed_tokens": self.consumed_tokens,
        }


_NEWCOMERS = 3
"""The place of this vote, behind that of the request and the two of the saver; those of the pace follow."""


def _no_newcomers() -> bool:
    return False


def _make_no_way() -> None:
    """Nobody can join a run that is not elastic."""


@dataclass
class Loop:
    """What a rank needs to train until the last step, the end of the data, or a signal.

    Attributes:
        facts: what a checkpoint says besides where the run stands: recipe, settings, identity of the data.
        held_out: this rank's micro-batches of every evaluation step.
        turns: who changes the strategy before a step, where there are several.
        newcomers: whether ranks wait to be taken in; `make_way` leaves the loop for them, between two steps.
        tracer, pace, watch: what records steps, measures ranks, and looks at what was measured.
    """

    session: Session
    loader: Loader
    saver: Saver
    request: StopRequest
    train_iters: int
    skip_nonfinite: bool
    memory: Memory
    facts: Mapping[str, Any]
    told: Told
    checkpoint: CheckpointSection
    evaluation: EvaluationSection | None = None
    held_out: Sequence[Sequence[MicroBatch]] = ()
    turns: Turns | None = None
    newcomers: Callable[[], bool] = _no_newcomers
    make_way: Callable[[], None] = _make_no_way
    tracer: Tracer | None = None
    pace: Pace | None = None
    watch: Watch | None = None

    def run(self) -> str:
        """Train; returns which signal ended it, or "" when training is complete.

        Whatever was trained is saved at the end, also when the end is a refusal on which all ranks agree: of a step
        that is not finite where that is not skipped, the state before it. A step that counts already, but was left
        before its evaluation or save, is finished first.

        Raises:
            RuntimeFailure: a step is not finite where that is not skipped, or a peer is gone.
            DataError: a document cannot be read.
            CheckpointError: the last state could not be saved; the checkpoints before are as they were.
        """
        asked, memory = False, self.memory
        if memory.result and memory.opened and memory.finished < memory.result.iteration:
            asked = self._finish(memory.result, memory.opened)
        while self.session.iteration < self.train_iters and not asked:
            loaded = self.loader.next(self.session.world.device)
            if loaded is None:
                break
            memory.opened, memory.result = replace(loaded, batches=[]), None
            result = self._step(loaded)
            asked = self._finish(result, loaded)
            if self.watch is not None and self.pace is not None:
                seconds = result.seconds["step"]
                self.watch.look(self.session.program, self.pace.rates, seconds, result.iteration)
            if result.votes[_NEWCOMERS] and not asked:
                self.make_way()
        ended = self._save(self.loader.position)
        ended = self.saver.finish() or ended
        if isinstance(ended, Failed):
            raise CheckpointError(f"the run ends without its last checkpoint: {ended.text}")
        return (self.request.signal or "a signal to another rank") if asked else ""

    def _step(self, loaded: LoadedStep) -> StepResult:
        """One step under its strategy, measured and traced where that is asked for."""
        if self.turns is not None:
            self.session = self.turns.take(loaded.strategy)
        own = (float(bool(self.request)), *self.saver.votes(), float(self.newcomers()))
        told = () if self.pace is None else self.pace.votes(self.session)
        if self.tracer is not None:
            self.tracer.begin(self.session)
        if self.pace is not None:
            self.pace.begin(self.session)
        result = self.session.step(loaded.batches, True, (*own, *told))
        if self.tracer is not None:
            self.tracer.end(self.session)
        if self.pace is not None:
            self.pace.end(self.session, loaded.batches, result.votes[len(own) :])
        return result

    def _finish(self, result: StepResult, loaded: LoadedStep) -> bool:
        """All that comes after a step; returns whether a rank was asked to stop."""
        asked, memory = result.votes[0] > 0, self.memory
        memory.result = result
        self.saver.settle(result.votes[1:_NEWCOMERS])
        if result.skipped and result.valid_tokens and not self.skip_nonfinite:
            self.session.take_back()
            self._refuse(
                f"iteration {result.iteration}: {result.skipped}; no rank has updated its weights. Lower "
                "training.lr, or pass over such steps with training.nonfinite: skip",
                DataPosition(result.iteration - 1, loaded.samples.first),
            )
        memory.count(result, loaded)
        self._after(result, loaded, asked)
        memory.finished = result.iteration
        return asked

    def _after(self, result: StepResult, loaded: LoadedStep, asked: bool) -> None:
        """Notes, evaluation, save, in an order that all ranks share."""
        memory = self.memory
        measured = None
        if self.evaluation and self._is_due(self.evaluation.interval) and not asked:
            measured = self._evaluate()
        self.told(result, loaded, measured, memory.note, memory.consumed_tokens)
        if memory.refusal:
            self._refuse(memory.refusal, loaded.position)
        if self._is_due(self.checkpoint.interval):
            self.session.enter("saving", result.iteration)
            self._save(loaded.position)

    def _refuse(self, why: str, position: DataPosition) -> NoReturn:
        """End the run on all ranks, with what it has saved."""
        if position.iteration:
            self._save(position)
        self.saver.finish()
        raise RuntimeFailure(why)

    def _is_due(self, interval: int | None) -> bool:
        """Whether something that is done every `interval` steps, and after the last, is done now."""
        iteration = self.session.iteration
        return bool(interval) and (iteration % (interval or 1) == 0 or iteration == self.train_iters)

    def _evaluate(self) -> Evaluation:
        """The loss over all held-out micro-batches, each token with the same weight."""
        if self.turns is not None:
            self.session = self.turns.evaluate()
        return Evaluation.of([self.session.evaluate(batches) for batches in self.held_out])

    def _save(self, position: DataPosition) -> Saved | Failed | None:
        payload = {**self.facts, "position": position.sample, "memory": self.memory.to_json()}
        return self.saver.start(self.session.iteration, payload)
