"""The numbers of a run, step by step: `metrics.jsonl` in its folder, and TensorBoard and wandb where asked for.

`metrics.jsonl` has one JSON object per iteration, each once, however often the run was stopped and resumed; `run.json`
beside it says what ran: recipe, strategy, kernels, versions.
"""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from hetero_megatron import __version__
from hetero_megatron.errors import RecipeError, RuntimeFailure
from hetero_megatron.runtime.clock import KINDS
from hetero_megatron.runtime.session import Evaluation, StepResult

ByLength = dict[str, list[int]]
"""Documents and their tokens, by the power of two up to which they are long: {"256": [3, 540]}."""
Value = float | int | str | dict[str, float] | ByLength | None
METRICS, RUN = "metrics.jsonl", "run.json"
LARGEST_EXPONENT = 20
"""A perplexity is exp of at most this, as Megatron prints it."""

TAGS: Mapping[str, str] = {
    "loss": "lm loss",
    "evaluation_loss": "lm loss validation",
    "evaluation_perplexity": "lm loss validation ppl",
    "lr": "learning-rate",
    "grad_norm": "grad-norm",
    "step_seconds": "iteration-time",
}
"""Megatron's names in TensorBoard and wandb; other values keep their own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which of several strategies made a step, and what switches took since the step before; number and name."""

    number: int
    strategy: str
    switch_seconds: float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the trainer knows of a step beside its StepResult.

    Attributes:
        first_sample: the number of the first sample of this step; its samples are consecutive.
        consumed_samples: of the whole run, up to and including this step; so are `consumed_tokens` (valid targets).
        padding_share: the share of tokens that only fill up; of all pipelines under packing documents, else of this one.
        data_wait_seconds: how long this rank waited for its data.
        evaluation: what was measured after the step.
        peak_memory_bytes: of this rank's GPU so far (`peak_memory_bytes`).
        note: what is worth reading later, such as a loss spike.
        lengths: of the step's documents, where they are shared by length.
        turn: of a run with several strategies.
        rates: FLOP/s of each rank while it computed, in the step before; those that are known.
        at: when the step counted and was done on this rank (`time.time`).
    """

    first_sample: int
    consumed_samples: int
    consumed_tokens: int
    padding_share: float = 0.0
    data_wait_seconds: float = 0.0
    evaluation: Evaluation | None = None
    peak_memory_bytes: int | None = None
    note: str | None = None
    lengths: Sequence[int] = ()
    turn: Turn | None = None
    rates: Mapping[int, float] = field(default_factory=dict)
    at: float | None = None


def perplexity(loss: float) -> float:
    """exp(loss); nan stays nan."""
    return math.exp(min(LARGEST_EXPONENT, loss)) if not math.isnan(loss) else loss


def step_values(result: StepResult, facts: StepFacts, flops_per_token: int, devices: int) -> dict[str, Value]:
    """One line of metrics. A number that is not finite is null, which JSON can say; what does not apply is left out.

    `tflops_per_device` are those of the model, on average over `devices`.
    """
    seconds = result.seconds["step"]
    speed = result.valid_tokens / seconds
    values: dict[str, Value] = {
        "iteration": result.iteration,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "valid_tokens": result.valid_tokens,
        "first_sample": facts.first_sample,
        "consumed_samples": facts.consumed_samples,
        "consumed_tokens": facts.consumed_tokens,
        "step_seconds": seconds,
        **{f"{kind}_seconds": result.seconds[kind] for kind in KINDS},
        "data_wait_seconds": facts.data_wait_seconds,
        "tokens_per_second": speed,
        "tflops_per_device": flops_per_token * speed / devices / 1e12,
        "padding_share": facts.padding_share,
    }
    if result.skipped:
        values["skipped"] = result.skipped
    if facts.evaluation is not None:
        values["evaluation_loss"] = facts.evaluation.loss
        values["evaluation_perplexity"] = perplexity(facts.evaluation.loss)
        values["evaluation_tokens"] = facts.evaluation.valid_tokens
    if facts.peak_memory_bytes is not None:
        values["peak_memory_bytes"] = facts.peak_memory_bytes
    if facts.lengths:
        values["longest_document"] = max(facts.lengths)
        values["lengths"] = by_length(facts.lengths)
    if facts.turn is not None:
        values["strategy"] = facts.turn.strategy
        values["strategy_number"] = facts.turn.number
        values["switch_seconds"] = facts.turn.switch_seconds
    if facts.rates:
        values["rank_tflops"] = {str(rank): rate / 1e12 for rank, rate in facts.rates.items()}
    if facts.note:
        values["note"] = facts.note
    if facts.at is not None:
        values["time"] = facts.at
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def by_length(lengths: Sequence[int]) -> ByLength:
    """How many documents, and tokens in them, there are of each length.

    >>> by_length([3, 4, 5, 100])
    {'4': [2, 7], '8': [1, 5], '128': [1, 100]}
    """
    found: dict[int, list[int]] = {}
    for length in lengths:
        entry = found.setdefault(1 << max(0, length - 1).bit_length(), [0, 0])
        entry[0] += 1
        entry[1] += length
    return {str(end): found[end] for end in sorted(found)}


def run_facts(recipe: Mapping[str, Any], strategy: str, kernels: Mapping[str, str]) -> dict[str, Any]:
    """What `run.json` says: the recipe with all its values, the strategy in short, kernels and versions."""
    versions = {
        "hetero_megatron": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    return {"recipe": dict(recipe), "strategy": strategy, "kernels": dict(kernels), "versions": versions}


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most that torch has allocated on a GPU so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def check_installed(tensorboard: bool, wandb: str | None) -> None:
    """Refuse a `logging` section that needs a package that is not there; nothing is imported.

    Raises:
        RecipeError: naming the key and the package.
    """
    for key, package, wanted in (
        ("tensorboard", "tensorboard", tensorboard),
        ("wandb", "wandb", bool(wandb)),
    ):
        # A folder that wandb has left in the working directory looks like a package without a file.
        found = find_spec(package) if wanted else None
        if wanted and (found is None or found.origin is None):
            raise RecipeError(
                f"logging.{key}: the package {package} is not installed; `pip install {package}`, or leave the key out"
            )


class Sink(Protocol):
    """Where values go besides the file."""

    def write(self, iteration: int, values: Mapping[str, Value]) -> None:
        """The values of one iteration."""

    def close(self, failed: bool) -> None:
        """The run is over."""


class Metrics:
    """The metrics of one run, written by one rank; a context manager, which notes whether the run failed."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        resumed_at: int = 0,
        flops_per_token: int = 0,
        devices: int = 1,
        tensorboard: bool = False,
        wandb: str | None = None,
    ) -> None:
        """Begin a run anew, or go on after iteration `resumed_at`: what was written of later ones is dropped.

        Raises:
            RecipeError: a package is missing.
            RuntimeFailure: the folder cannot be written to.
        """
        check_installed(tensorboard, wandb)
        self._flops_per_token, self._devices = flops_per_token, devices
        self._path, self._trouble = folder / METRICS, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = _read_run(folder / RUN) if resumed_at else {}
            lines = kept_lines(self._path, resumed_at)
            _replace(self._path, "".join(f"{line}\n" for line in lines))
            self._sinks: list[Sink] = (
                [_TensorBoard(folder / "tensorboard", resumed_at)] if tensorboard else []
            )
            run = {**facts, "resumed_at": resumed_at}
            if wandb:
                sink = _Wandb(wandb, folder, run, before.get("wandb_id"))
                self._sinks.append(sink)
                run["wandb_id"] = sink.id
            _replace(folder / RUN, json.dumps(run, indent=2) + "\n")
            self._file: RawIOBase = self._path.open("ab", buffering=0)
            self._waiting = bytearray()
        except OSError as error:
            raise RuntimeFailure(f"metrics cannot be written to {folder}: {error.strerror}") from error

    def step(self, result: StepResult, facts: StepFacts) -> dict[str, Value]:
        """Write one step; returns its values.

        What a full disk does not take waits for the next step (`trouble`): it must not end a run.
        """
        values = step_values(result, facts, self._flops_per_token, self._devices)
        self._waiting += json.dumps(values).encode() + b"\n"
        self._write()
        for sink in self._sinks:
            sink.write(result.iteration, values)
        return values

    @property
    def trouble(self) -> str:
        """Why lines are still waiting to be written, "" when none are."""
        return self._trouble if self._waiting else ""

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting) or 0]
        except OSError as error:
            self._trouble = f"metrics cannot be written to {self._path}: {error.strerror}"

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        self._file.close()
        for sink in self._sinks:
            sink.close(kind is not None)


def kept_lines(path: Path, last: int) -> list[str]:
    """The lines of a metrics file up to iteration `last`, each iteration once; a line that was cut off is dropped."""
    if not last or not path.exists():
        return []
    kept: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            iteration = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(iteration, int) and iteration <= last:
            kept[iteration] = line
    return [kept[iteration] for iteration in sorted(kept)]


def _read_run(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _tagged(values: Mapping[str, Value]) -> dict[str, float | int]:
    """Numbers by the name they have in TensorBoard and wandb."""
    return {
        TAGS.get(name, name): value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "iteration"
    }


class _TensorBoard:
    """Scalars for TensorBoard; steps after the one a run resumes at are taken back."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(self, iteration: int, values: Mapping[str, Value]) -> None:
        for tag, value in _tagged(values).items():
            self._writer.add_scalar(tag, value, iteration)

    def close(self, failed: bool) -> None:
        del failed
        self._writer.close()


class _Wandb:
    """A run of a wandb project; a resumed run goes on under its id. WANDB_MODE=offline works, as wandb reads it."""

    def __init__(self, project: str, folder: Path, facts: Mapping[str, Any], known: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            dir=str(folder.resolve()),
            name=folder.name,
            config=dict(facts),
            allow_val_change=True,
            id=known,
            resume="allow",
        )
        self.id: str = self._run.id

    def write(self, iteration: int, values: Mapping[str, Value]) -> None:
        self._run.log(_tagged(values), step=iteration)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
