"""What one rank does while a degree of parallelism is measured: steps whose passes are timed one by one (paper A.1)."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from hetero_megatron.data.batch import pack
from hetero_megatron.data.piece import Piece
from hetero_megatron.errors import PlannerError
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.layers.kernels import Kernels
from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import Action
from hetero_megatron.planner.measure_parts import (
    embedding_seconds,
    reserved_bytes,
    synchronize,
    transfers,
    weight_gradient_seconds,
)
from hetero_megatron.planner.profiles import Kept, Measurement, Update
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World

FEW, MORE = 1, 3
"""Layers of the two models whose difference is a layer's time."""
Size = tuple[int, int]
"""(tokens of a micro-batch, length of its documents)."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to measure.

    Attributes:
        degrees: (tp, cp) of each stage to be measured.
        sizes: micro-batches.
        rounds: how often everything is repeated.
        micro_batches: of each step.
        copies: of a stage, side by side: a core that is alone is faster than one whose neighbours compute, too.
    """

    degrees: tuple[tuple[int, int], ...]
    sizes: tuple[Size, ...]
    rounds: int = 5
    micro_batches: int = 4
    sequence_parallel: bool = True
    context_parallel: str = "ring"
    copies: int = 1
    message_bytes: tuple[int, ...] = (2**14, 2**17, 2**20, 2**22)

    def __post_init__(self) -> None:
        for tp, cp in self.degrees:
            if tp < 1 or cp < 1:
                raise PlannerError(f"profile: tp {tp} and cp {cp} are degrees; 1 or more is right")
        for tokens, length in self.sizes:
            if not 1 <= length <= tokens:
                raise PlannerError(
                    f"profile: a micro-batch of {tokens} tokens has no documents of {length}; a length between 1 and "
                    f"{tokens} is right"
                )
        if self.copies < 1:
            raise PlannerError(f"profile: {self.copies} copies side by side; 1 or more is right")
        if self.rounds < 1 or self.micro_batches < 2:
            raise PlannerError(
                f"profile: {self.rounds} rounds of {self.micro_batches} micro-batches; 1 round and 2 micro-batches, "
                "of which the first is left out, are the least"
            )


class TimedSession:
    """A Session whose actions are timed one by one."""

    def __init__(
        self, program: Program, world: World, model: Llama, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        specs = initial_values(model)
        self.modules, self.device = dict(model.named_modules()), world.device
        self.session = Session(
            program,
            world,
            self.modules,
            lambda slot: initial_value(
                slot.name, specs[slot.name], slot.bounds, slot.full_shape, 0, device=world.device
            ),
            OptimizerSettings(lr=0.0, train_iters=10**9),
            dtype,
            kernels.load(),
        )
        self.multiple, self.vocab_size = program.token_multiple(0), model.config.vocab_size
        self.elements = sum(slot.elements for slot in self.session.state.slots)
        self._seconds: dict[str, list[float]] = {}
        self._copies, self._inside = len(program.strategy.pipelines), 0.0
        self._watch: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._compute = self.session.stage.compute
        self.session.stage.compute = self._timed  # type: ignore[method-assign]  # the same call, with a watch

    def kept_bytes(self, batch: MicroBatch) -> int:
        """Bytes that autograd keeps of a micro-batch between forward and backward; weights are not counted."""
        weights = self.session.state.compute.untyped_storage().data_ptr()
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() != weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._watch = keep
        self.step([batch] * 2)
        self._watch = None
        return sum(seen.values())

    def _timed(self, action: Action, batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        synchronize(self.device)
        before = self.session.clock.seconds["communication"]
        began = time.perf_counter()
        if self._watch is not None and action == Action("F", 0):
            with torch.autograd.graph.saved_tensors_hooks(self._watch, lambda tensor: tensor):
                loss = self._compute(action, batches)
        else:
            loss = self._compute(action, batches)
        synchronize(self.device)
        self._seconds[action.kind].append(time.perf_counter() - began)
        self._inside += self.session.clock.seconds["communication"] - before
        return loss

    def step(self, batches: Sequence[MicroBatch]) -> tuple[float, float, float]:
        """Seconds of a forward and a backward pass, and of the step beside all passes."""
        self._seconds, self._inside = {"F": [], "B": []}, 0.0
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        self.session.step(batches)
        synchronize(self.device)
        whole = time.perf_counter() - began
        forward, backward = self._seconds["F"], self._seconds["B"]
        beside = whole - sum(forward) - sum(backward)
        if self._copies > 1:
            # Gradients of several copies are reduced, which has its own measurements.
            beside -= self.session.clock.seconds["communication"] - self._inside
        return statistics.median(forward[1:]), statistics.median(backward[1:]), max(0.0, beside)


class MeasuringRank:
    """What one rank of a degree does."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        runs: Mapping[int, TimedSession],
        kind: str,
        precision: str,
        degree: tuple[int, int],
        link: str,
    ) -> None:
        self.experiment, self.world, self.runs = experiment, world, runs
        self.kind, self.precision, self.degree, self.link = kind, precision, degree, link

    def measure(self) -> dict[str, object]:
        """Everything, as plain values; the same on every rank."""
        experiment, world = self.experiment, self.world
        batches = {size: self._batches(size) for size in experiment.sizes}
        least: dict[tuple[int, Size, int], float] = defaultdict(lambda: float("inf"))
        for number in range(experiment.rounds + 1):
            for size, own in batches.items():
                order = self.runs if number % 2 else dict(reversed([*self.runs.items()]))
                for layers, run in order.items():
                    for place, seconds in enumerate(run.step(own)):
                        if number:
                            key = (layers, size, place)
                            least[key] = min(least[key], seconds)
        keys = sorted(least)
        agreed = torch.tensor([least[key] for key in keys], dtype=torch.float64)
        if len(world.ranks) > 1:
            dist.all_reduce(agreed, group=world.control)
            agreed /= len(world.ranks)
        values = dict(zip(keys, agreed.tolist(), strict=True))
        found: list[Measurement] = []
        for size in experiment.sizes:
            found += self._units(size, values, batches[size][0])
        kept = [each for size in experiment.sizes for each in self._kept(size, batches[size][0])]
        whole = {layers: min(values[layers, size, 2] for size in experiment.sizes) for layers in self.runs}
        updates = [
            Update(self.kind, self.precision, run.elements, whole[layers])
            for layers, run in self.runs.items()
        ]
        moved = transfers(world, self.link, experiment.message_bytes, experiment.rounds)
        return {
            "measurements": [asdict(each) for each in found],
            "updates": [asdict(each) for each in updates],
            "kept": [asdict(each) for each in kept],
            "transfers": [asdict(each) for each in moved],
            "reserved": reserved_bytes(world.device),
        }

    def _batches(self, size: Size) -> list[MicroBatch]:
        tokens, length = size
        ids = np.random.default_rng(0).integers(0, self.runs[FEW].vocab_size, tokens + 1)
        pieces = [
            Piece(
                number,
                ids[first : min(first + length, tokens)],
                ids[first + 1 : min(first + length, tokens) + 1],
            )
            for number, first in enumerate(range(0, tokens, length))
        ]
        one = pack(pieces, self.runs[FEW].multiple, self.world.device)
        return [one] * self.experiment.micro_batches

    def _kept(self, size: Size, batch: MicroBatch) -> list[Kept]:
        """What a layer keeps, and the rest as the head's; the same on all ranks of a degree."""
        few, more = (self.runs[layers].kept_bytes(batch) for layers in (FEW, MORE))
        layer = (more - few) // (MORE - FEW)
        return [
            Kept(self.kind, self.precision, unit, *self.degree, *size, amount)  # type: ignore[arg-type]
            for unit, amount in (("layer", layer), ("head", max(0, few - layer)))
        ]

    def _units(
        self, size: Size, values: Mapping[tuple[int, Size, int], float], batch: MicroBatch
    ) -> list[Measurement]:
        run = self.runs[FEW]
        layer = [
            max(0.0, values[MORE, size, place] - values[FEW, size, place]) / (MORE - FEW) for place in (0, 1)
        ]
        rest = [max(0.0, values[FEW, size, place] - layer[place]) for place in (0, 1)]
        own = run.session.stage.own_tokens([batch])[0]
        embedding = embedding_seconds(run.modules["embedding"], own.tokens_T, self.experiment.rounds)
        late = weight_gradient_seconds(run.modules, own.segments.tokens, self.experiment.rounds)
        times = {
            ("layer", "forward"): layer[0],
            ("layer", "backward"): layer[1],
            ("layer", "weight_gradient"): min(late["layer"], layer[1]),
            ("embedding", "forward"): embedding[0],
            ("embedding", "backward"): embedding[1],
            ("head", "forward"): max(0.0, rest[0] - embedding[0]),
            ("head", "backward"): max(0.0, rest[1] - embedding[1]),
            ("head", "weight_gradient"): min(late["head"], rest[1]),
        }
        tokens, length = size
        return [
            Measurement(self.kind, self.precision, unit, phase, *self.degree, tokens, length, seconds)  # type: ignore[arg-type]
            for (unit, phase), seconds in times.items()
        ]
