"""Measure what the units of a model take on this machine, by training a few layers of it for a few steps (paper A.1).

Real layers in a real Session, on as many forked ranks as a degree of parallelism has. The model is run with one and with
three layers in turn: half of the difference is a layer, what is left of the smaller one is embedding and head. Each
number is the median of a round's micro-batches, and the least of all rounds, because what disturbs a machine only adds.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero_megatron.cluster import KINDS, Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.planner.measure_rank import FEW, MORE, Experiment, MeasuringRank, Size, TimedSession
from hetero_megatron.planner.profiles import Kept, Measurement, Profiles, Transfer, Update
from hetero_megatron.program import Program
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    link = KINDS[device_kind].link.name if device_kind in KINDS else device_type
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
                layers: TimedSession(program, world, models[layers], DTYPES[precision], kernels)
                for layers, program in programs.items()
            }
            found = MeasuringRank(experiment, world, runs, kind, precision, degree, link).measure()
            if world.rank == 0:
                result.write_text(json.dumps(found), encoding="utf-8")
            dist.barrier()
            world.leave()

        if code := fork_ranks(count, main):
            raise PlannerError(f"profile: a rank of tp {tp}, cp {cp} ended with exit code {code}")
        raw: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return raw


__all__ = ["Experiment", "Size", "measure"]
