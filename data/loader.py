"""Steps made ready for one rank, ahead of training (paper §8, dispatch)."""

import time
from dataclasses import dataclass

import torch

from hetero_megatron.data.batch import PackedTokens
from hetero_megatron.data.packing import Packing, prepare
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import Steps, StepSamples
from hetero_megatron.runtime.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One step of one rank's pipeline.

    Attributes:
        batches: the pipeline's micro-batches, none in a last step too short for all pipelines.
        samples: what the whole step takes, over all pipelines.
        position: where the run stands when this step is done.
        wait_seconds: how long the rank waited for it.
        tokens: real tokens in `batches`.
        padding: filler tokens in `batches`.
    """

    batches: list[MicroBatch]
    samples: StepSamples
    position: DataPosition
    wait_seconds: float
    tokens: int
    padding: int


class Loader:
    """The steps of one pipeline from `position` on, in order.

    Every rank of a pipeline has a loader of its own, and all of them make the same batches.
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
    ) -> None:
        self.steps, self.dispatch = steps, dispatch
        self.pipeline_number, self.multiple = pipeline_number, multiple
        self.position = position or DataPosition()
        self.workers, self.prefetch = workers, prefetch

    def start(self) -> None:
        """Fork the workers; before this process has any process group or CUDA context."""

    def next(self, device: torch.device | str = "cpu") -> LoadedStep | None:
        """The next step's micro-batches on `device`, or None when the epochs are over.

        Raises:
            DataError: a document cannot be read.
        """
        began = time.perf_counter()
        step = self.steps.at(self.position)
        if step is None:
            return None
        batches = self._prepare(step)
        self.position = self.steps.after(step)
        padding = sum(batch.padding for batch in batches)
        tokens = sum(sum(batch.lengths) for batch in batches) - padding
        made = [batch.on(device) for batch in batches]
        return LoadedStep(made, step, self.position, time.perf_counter() - began, tokens, padding)

    def close(self) -> None:
        """End the workers."""

    def _prepare(self, step: StepSamples) -> list[PackedTokens]:
        share = self.dispatch.share(step)
        return prepare(self.dispatch, share, self.pipeline_number, self.multiple)
