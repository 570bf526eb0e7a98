"""Measure what the units of a model take on this machine, by training a few layers of it for a few steps (paper A.1).

Real layers in a real Session, on as many forked ranks as a degree of parallelism has. The model is run with one and with
three layers in turn: half of the difference is a layer, what is left of the smaller one is embedding and head. Each
number is the median of a round's micro-batches, and the least of all rounds, because what disturbs a machine only adds.
"""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hetero_megatron.cluster import Cluster
from hetero_megatron.data.batch import pack
from hetero_megatron.data.rows import Piece
from hetero_megatron.errors import PlannerError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import Action
from hetero_megatron.planner.measure_parts import (
    embedding_seconds,
    reserved_bytes,
    synchronize,
    transfers,
    weight_gradient_seconds,
)
from hetero_megatron.planner.profiles import Kept, Measurement, Profiles, Transfer, Update
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

FEW, MORE = 1, 3
"""Layers of the two models whose difference is a layer's time."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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


def measure(
    config: LlamaConfig,
    precision: str,
    device_kind: str,
    device_type: str,
    experiment: Experiment,
    progress: Callable[[str], None] = print,
) -> Profiles:
    """Measure on this machine.

    `device_kind` is what the profile calls its devices, such as `cpu`; `progress` is told what is being measured.

    Raises:
        PlannerError: a degree does not fit the model, the machine has too few GPUs, or a rank failed.
    """
    torch.set_num_threads(1)
    _check(config, device_type, experiment)
    kernels = choose_all({}, device_type, DTYPES[precision], Facts(config.head_size))
    preload(False)
    link = Cluster.local_cpu(1).kind(0).link.name if device_type == "cpu" else "nvlink"
    found = Profiles(model=_sizes_of(config), notes=f"{kernels}".replace("\n", "; "))
    for tp, cp in experiment.degrees:
        count = _ranks(experiment, tp, cp)
        progress(f"tp {tp}, cp {cp}: {count} rank{'s' * (count > 1)}, {len(experiment.sizes)} sizes")
        raw = _on_ranks(config, precision, device_kind, device_type, experiment, kernels, (tp, cp), link)
        measurements = tuple(Measurement(**each) for each in raw["measurements"])
        moved = tuple(Transfer(**each) for each in raw["transfers"])
        known = {(each.link, each.operation, each.ranks) for each in found.transfers}
        updates = tuple(Update(**each) for each in raw["updates"])
        found = replace(
            found,
            measurements=found.measurements + measurements,
            transfers=found.transfers
            + tuple(each for each in moved if (each.link, each.operation, each.ranks) not in known),
            kept=found.kept + tuple(Kept(**each) for each in raw["kept"]),
            updates=found.updates + (updates if tp * cp == 1 or not found.updates else ()),
            reserved_bytes=dict(found.reserved_bytes) | {device_kind: max(raw["reserved"], 0)},
        )
        if tp * cp > 1:
            before = found.fixed_seconds.get(device_kind, 0.0)
            beyond = raw["updates"][0]["seconds"] - (
                found.update_seconds(device_kind, precision, raw["updates"][0]["elements"]) or 0.0
            )
            found = replace(found, fixed_seconds={device_kind: max(before, beyond, 0.0)})
    return found


def _check(config: LlamaConfig, device_type: str, experiment: Experiment) -> None:
    most = max(_ranks(experiment, *degree) for degree in experiment.degrees)
    if device_type == "cuda" and torch.cuda.device_count() < most:
        raise PlannerError(
            f"profile: tp x cp of {most} needs as many GPUs, and this machine has {torch.cuda.device_count()}; "
            "ask for smaller degrees with --tp and --cp"
        )
    for tp, cp in experiment.degrees:
        facts = replace(config, num_layers=MORE).facts
        _strategy(experiment, tp, cp, MORE).check(facts, range(_ranks(experiment, tp, cp)))


def _sizes_of(config: LlamaConfig) -> dict[str, int]:
    names = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
    return {name: getattr(config, name) for name in names}


def _ranks(experiment: Experiment, tp: int, cp: int) -> int:
    """Ranks of a degree: as many copies of a stage as fit beside each other, one at least."""
    return tp * cp * max(1, experiment.copies // (tp * cp))


def _strategy(experiment: Experiment, tp: int, cp: int, layers: int) -> Strategy:
    size = tp * cp
    return Strategy(
        tuple(
            Pipeline(
                experiment.micro_batches,
                1,
                (Stage(tuple(range(first, first + size)), (0, layers - 1), tp, cp),),
            )
            for first in range(0, _ranks(experiment, tp, cp), size)
        ),
        sequence_parallel=experiment.sequence_parallel,
        context_parallel=experiment.context_parallel,
    )


def _on_ranks(
    config: LlamaConfig,
    precision: str,
    kind: str,
    device_type: str,
    experiment: Experiment,
    kernels: Kernels,
    degree: tuple[int, int],
    link: str,
) -> dict[str, Any]:
    """Fork the ranks of one degree; what rank 0 found, as plain values."""
    tp, cp = degree
    count = _ranks(experiment, tp, cp)
    models = {layers: Llama(replace(config, num_layers=layers)) for layers in (FEW, MORE)}
    cluster = Cluster.local_cpu(count)
    programs = {
        layers: Program.build(
            trace(model), _strategy(experiment, tp, cp, layers), model.config.facts, cluster
        )
        for layers, model in models.items()
    }
    with tempfile.TemporaryDirectory(prefix="hetero-megatron-") as folder:
        result = Path(folder) / "found.json"

        def main(rendezvous: Rendezvous) -> None:
            device = torch.device("cpu")
            if device_type == "cuda":
                device = torch.device("cuda", rendezvous.index)
                torch.cuda.set_device(device)
            world = World.join(rendezvous, tuple(range(count)), device)
            runs = {
                layers: _Timed(program, world, models[layers], DTYPES[precision], kernels)
                for layers, program in programs.items()
            }
            found = _Rank(experiment, world, runs, kind, precision, degree, link).measure()
            if world.rank == 0:
                result.write_text(json.dumps(found), encoding="utf-8")
            dist.barrier()
            world.leave()

        if code := fork_ranks(count, main):
            raise PlannerError(f"profile: a rank of tp {tp}, cp {cp} ended with exit code {code}")
        raw: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return raw


class _Timed:
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


class _Rank:
    """What one rank of a degree does."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        runs: Mapping[int, _Timed],
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
