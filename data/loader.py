"""Steps made ready for one rank, ahead of training (paper §8, dispatch)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch

from hetero_megatron.data.batch import PackedTokens
from hetero_megatron.data.document_dispatch import DispatchReport
from hetero_megatron.data.packing import Packing, prepare
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import Steps, StepSamples
from hetero_megatron.data.workers import Worker
from hetero_megatron.errors import DataError, HeteroError
from hetero_megatron.runtime.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One step of one rank's pipeline.

    Attributes:
        batches: the pipeline's micro-batches; none in a last step too short for all pipelines.
        samples: what the whole step takes, over all pipelines.
        position: where the run stands when this step is done.
        wait_seconds: how long the rank waited for it.
        tokens: real tokens in `batches`.
        padding: filler tokens in `batches`.
        report: how the step is shared over all pipelines, where documents are dispatched by a cost.
        strategy: the number of the strategy that the step takes, of several in one run.
        lengths: of the step's documents, over all pipelines, where they are shared by length.
    """

    batches: list[MicroBatch]
    samples: StepSamples
    position: DataPosition
    wait_seconds: float
    tokens: int
    padding: int
    report: DispatchReport | None = None
    strategy: int = 0
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step of one pipeline as arrays of the host."""

    samples: StepSamples
    batches: list[PackedTokens]
    report: DispatchReport | None
    strategy: int = 0
    lengths: tuple[int, ...] = ()


Place = tuple[int, int] | None
"""A rank's pipeline in a strategy, and what its micro-batches are filled up to; None where the rank is idle."""


class Loader:
    """The steps of one pipeline from `position` on, in order.

    Every rank of a pipeline has a loader of its own, and all of them make the same batches. Of `workers` processes,
    number w prepares steps w, w + workers, ..., each at most `prefetch` ahead of what the rank has taken; without
    workers a step is prepared when it is asked for. `close` ends them.
    """

    def __init__(
        self,
        steps: Steps,
        dispatch: Packing,
        pipeline_number: int,
        multiple: int = 1,
        position: DataPosition | None = None,
        workers: int = 1,
        prefetch: int = 2,
        places: Sequence[Place] = (),
    ) -> None:
        """Nothing is read or started.

        `places`: where the rank stands in each of several strategies; they take the place of `pipeline_number` and
        `multiple`.

        Raises:
            DataError: a negative number of workers, or no step ahead.
        """
        if workers < 0 or prefetch < 1:
            raise DataError(
                f"workers {workers} and prefetch {prefetch}: workers are 0 or more, and each prepares 1 step or more "
                "ahead"
            )
        self.steps, self.dispatch = steps, dispatch
        self.pipeline_number, self.multiple = pipeline_number, multiple
        self.places: tuple[Place, ...] = tuple(places) or ((pipeline_number, multiple),)
        self.position = position or DataPosition()
        self.workers, self.prefetch = workers, prefetch
        self._workers: list[Worker] = []
        self._inline: Iterator[PreparedStep] | None = None
        self._taken = 0
        self._failed: HeteroError | None = None

    @property
    def processes(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.pid for worker in self._workers)

    def start(self) -> None:
        """Fork the workers; before this process has process groups, threads or a CUDA context.

        Raises:
            DataError: CUDA has started here, and would not survive in a forked process.
        """
        started = bool(self._workers) or self._inline is not None
        assert not started, "a loader is started once"
        if not self.workers:
            self._inline = self._prepared(0, 1)
            return
        if torch.cuda.is_initialized():
            raise DataError(
                "data workers cannot be forked once CUDA has started in this process; start the loader first, or "
                "set data.workers to 0"
            )
        for number in range(self.workers):
            items = self._prepared(number, self.workers)
            name = f"data worker {number} of pipeline {self.pipeline_number}"
            self._workers.append(Worker(name, items, self.prefetch, self._workers))

    def next(self, device: torch.device | str = "cpu") -> LoadedStep | None:
        """The next step's micro-batches on `device`, or None when the epochs are over.

        Raises:
            DataError: a document cannot be read or fits nowhere, or a worker has failed or was killed.
        """
        assert self._workers or self._inline is not None, "start the loader first"
        began = time.perf_counter()
        prepared = self._take()
        waited = time.perf_counter() - began
        if prepared is None:
            return None
        self._taken += 1
        self.position = self.steps.after(prepared.samples)
        padding = sum(batch.padding for batch in prepared.batches)
        tokens = sum(len(batch.tokens_T) for batch in prepared.batches) - padding
        batches = [batch.on(device) for batch in prepared.batches]
        return LoadedStep(
            batches,
            prepared.samples,
            self.position,
            waited,
            tokens,
            padding,
            prepared.report,
            prepared.strategy,
            prepared.lengths,
        )

    def _take(self) -> PreparedStep | None:
        """The next step; a failure is told again to whoever asks again, for it is not the end of the data."""
        if self._failed is not None:
            raise self._failed
        try:
            if self._inline is not None:
                return next(self._inline, None)
            worker = self._workers[self._taken % len(self._workers)]
            return cast(PreparedStep | None, worker.take(f"step {self.position.iteration}"))
        except HeteroError as error:
            self._failed = error
            raise

    def close(self) -> None:
        """End the workers and wait until they are gone."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Loader":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepared(self, first: int, every: int) -> Iterator[PreparedStep]:
        """Every so many steps from `position` on; numpy only."""
        for number, step in enumerate(self._decided()):
            if number % every == first:
                share = self.dispatch.share(step)
                place = self.places[share.strategy]
                batches = prepare(self.dispatch, share, *place) if place else []
                yield PreparedStep(step, batches, share.report, share.strategy, share.lengths)

    def _decided(self) -> Iterator[StepSamples]:
        """All steps from `position` on, decided on in blocks: what a block takes follows from where the run starts."""
        position, over = self.position, False
        while not over:
            block: list[StepSamples] = []
            while len(block) < self.dispatch.lookahead and not over:
                step = self.steps.at(position)
                over = step is None
                if step is not None:
                    block.append(step)
                    position = self.steps.after(step)
            if block:
                self.dispatch.decide(block)
            yield from block
