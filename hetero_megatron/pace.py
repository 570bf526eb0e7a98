"""How fast every rank computes, told among the votes of the next step: no collective of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.work import Work
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.recorder import Recorder
from hetero_megatron.runtime.session import Passes, Session

GPU_INTERVAL = 10
"""Steps from one measurement to the next on GPUs, where it needs events."""
NUMBERS = 2
"""Votes of a rank: its rate while it computes, and over whole passes."""


@dataclass(frozen=True, slots=True)
class Rate:
    """FLOP/s of one rank in forward and backward passes, of the model's operations; 0 where not measured.

    Attributes:
        compute: over the seconds in which it computed, waiting for others excluded.
        whole: over its passes, collectives inside them included.
    """

    compute: float
    whole: float


def stage_flops(work: Work, program: Program, rank: int, tokens: int, pairs: int) -> float:
    """What a rank's share of its stage's forward and backward passes comes to, for so many tokens and pairs of them."""
    stage, (number, _) = program.stage(rank), program.pipeline_of(rank)
    forward = len(stage.layer_numbers) * work.layer_flops(tokens, pairs)
    if stage is program.strategy.pipelines[number].stages[-1]:
        forward += 2 * work.table * tokens
    return 3 * forward / len(stage.ranks)


class Pace:
    """One rank's side of it, and what it knows of all ranks: of the step before the latest one."""

    def __init__(self, config: LlamaConfig) -> None:
        self._work = Work(config)
        self._own = Rate(0.0, 0.0)
        self.rates: Mapping[int, Rate] = {}

    def begin(self, session: Session) -> None:
        """A step begins; on a GPU some steps are measured with events, unless a trace is made anyway."""
        clock, device = session.clock, session.world.device
        if device.type == "cuda" and clock.recorder is None and not session.iteration % GPU_INTERVAL:
            clock.recorder = Recorder(session.world.rank, device)

    def votes(self, session: Session) -> tuple[float, ...]:
        """For `Session.step`: the place of this rank among all, the others' places empty."""
        ranks = session.world.ranks
        found = [0.0] * (NUMBERS * len(ranks))
        at = NUMBERS * ranks.index(session.world.rank)
        found[at : at + NUMBERS] = self._own.compute, self._own.whole
        return tuple(found)

    def end(self, session: Session, batches: Sequence[MicroBatch], votes: Sequence[float]) -> None:
        """The step is done: `votes` are the sums of what `votes` gave, `batches` what this rank's pipeline computed."""
        self.rates = {
            rank: Rate(*votes[NUMBERS * place : NUMBERS * (place + 1)])
            for place, rank in enumerate(session.world.ranks)
        }
        passes = _passes(session)
        if passes is None:
            return
        tokens = sum(batch.segments.tokens for batch in batches)
        pairs = sum(length * length for batch in batches for length in _lengths(batch))
        flops = stage_flops(self._work, session.program, session.world.rank, tokens, pairs)
        measured = passes.compute > 0 and passes.whole > 0
        self._own = Rate(flops / passes.compute, flops / passes.whole) if measured else Rate(0.0, 0.0)


def _lengths(batch: MicroBatch) -> list[int]:
    return [end - start for start, end in pairwise(batch.segments.cu_seqlens)]


def _passes(session: Session) -> Passes | None:
    """Seconds of the latest step's passes; None where a GPU's were not measured in it."""
    if session.world.device.type != "cuda":
        return session.passes
    recorder = session.clock.recorder
    if recorder is None:
        return None
    spans = recorder.spans(session.iteration)
    session.clock.recorder = None
    whole = sum(span.end - span.start for span in spans if span.category in ("forward", "backward"))
    return Passes(whole, whole)
