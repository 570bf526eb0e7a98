"""Runs that change strategy between two steps: many pairs of strategies in one start of ranks."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetero_megatron.cluster import Cluster
from hetero_megatron.data.dispatch import deal
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS
from hetero_megatron.runtime.move import MESSAGE_BYTES
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, ParameterSlot
from hetero_megatron.runtime.switch import SwitchReport
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Strategy
from tests.distributed.ranks import run_ranks
from tests.distributed.training import ADAM, T0, Outcome, StepData, assemble, build, micro_batch

Shards = dict[str, dict[str, Tensor]]
Pair = tuple[str, str]
KINDS = ("parameter", MASTER, *MOMENTS)


@dataclass
class Course:
    """One pair on one rank: what it held before and after the switch, counters, memory, and the steps after it."""

    pair: Pair
    report: SwitchReport
    held: Shards
    got: Shards
    counters: tuple[int, int, int] | None
    freed: bool
    results: list[StepResult]
    end: Shards


def model_maker(config: LlamaConfig) -> Any:
    """Modules of a new copy of the model at each call."""
    model = Llama(config)

    def modules() -> Mapping[str, nn.Module]:
        return dict(copy.deepcopy(model).named_modules())

    return modules


def initial_of(config: LlamaConfig, seed: int = 7) -> Any:
    """As `build_single_device(config, seed)`."""
    specs = initial_values(Llama(config))

    def initial(slot: ParameterSlot) -> Tensor:
        return initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, seed)

    return initial


def batches_of(program: Program, rank: int, documents: StepData) -> list[MicroBatch]:
    """The micro-batches of a rank's pipeline: rows of the step dealt over the pipelines in order."""
    number, _ = program.pipeline_of(rank)
    pipelines = program.strategy.pipelines
    rows = deal(len(documents), [(p.micro_batches, p.micro_batch_size) for p in pipelines])[number]
    return [micro_batch([documents[row] for row in each], program.token_multiple(number)) for each in rows]


def run_steps(session: Session, steps: Sequence[StepData]) -> tuple[list[StepResult], Shards]:
    """Train; the shards at the end hold the last step's gradients as a mean over targets."""
    gradients: dict[str, Tensor] = {}
    session.gradient_hook = lambda slot, gradient, divisor: gradients.update({slot.name: gradient / divisor})
    results = [
        session.step(batches_of(session.program, session.world.rank, documents)) for documents in steps
    ]
    shards = session.shards()
    for name, gradient in gradients.items():
        shards[name]["gradient"] = gradient
    return results, shards


def restart(session: Session, initial: Any) -> None:
    """Begin a new run in the same session."""
    session.gather.finish()
    session.iteration = session.skipped_iterations = session.state.step = 0
    session.start(initial)


def run_pairs(
    plans: Mapping[str, Strategy],
    pairs: Sequence[Pair],
    steps: Sequence[StepData],
    before: int = 2,
    config: LlamaConfig = T0,
    settings: OptimizerSettings = ADAM,
    dtype: torch.dtype = torch.float32,
    bucket_elements: int = BUCKET_ELEMENTS,
    message_bytes: int = MESSAGE_BYTES,
    cluster: Cluster | None = None,
) -> tuple[dict[str, Program], list[dict[int, Course]]]:
    """For each pair: a run of its own that switches before step number `before`; by pair and rank."""
    model = Llama(config)
    programs = {
        name: Program.build(trace(model), plan, config.facts, cluster) if cluster else build(model, plan)
        for name, plan in plans.items()
    }
    ranks = sorted({rank for plan in plans.values() for rank in plan.ranks})
    initial = initial_of(config)

    def work(world: World) -> list[Course]:
        switcher = Switcher(
            programs,
            world,
            model_maker(config),
            initial,
            settings,
            dtype,
            bucket_elements=bucket_elements,
            message_bytes=message_bytes,
            active=pairs[0][0],
        )
        courses = []
        for first, second in pairs:
            if switcher.active != first:
                switcher.switch(first)
            old = switcher.session
            held: Shards = {}
            if old:
                restart(old, initial)
                _, held = run_steps(old, steps[:before])
            report = switcher.switch(second)
            new, got, counters = switcher.session, dict[str, dict[str, Tensor]](), None
            results: list[StepResult] = []
            end: Shards = {}
            if new:
                got = new.shards()
                counters = new.iteration, new.skipped_iterations, new.state.step
                results, end = run_steps(new, steps[before:])
            freed = old is None or not any(f.untyped_storage().nbytes() for f in old.state.flats.values())
            courses.append(Course((first, second), report, held, got, counters, freed, results, end))
        return courses

    found = run_ranks(ranks, work)
    return programs, [
        {rank: courses[place] for rank, courses in found.items()} for place in range(len(pairs))
    ]


def whole(
    program: Program, shards: Mapping[int, Shards], kinds: Sequence[str] = KINDS
) -> dict[str, dict[str, Tensor]]:
    """Gathered tensors; copies on several ranks have to be bit-equal."""
    return assemble(program, {rank: shards[rank] for rank in program.strategy.ranks}, kinds)


def outcome_of(program: Program, courses: Mapping[int, Course]) -> Outcome:
    """The steps after the switch, as a run."""
    outcome = Outcome()
    for results in zip(*(courses[rank].results for rank in program.strategy.ranks), strict=True):
        assert len({repr((r.loss, r.grad_norm, r.valid_tokens, r.skipped)) for r in results}) == 1
        outcome.losses.append(results[0].loss)
        outcome.norms.append(results[0].grad_norm)
    ends = {rank: course.end for rank, course in courses.items()}
    outcome.tensors = whole(program, ends, ("parameter", "gradient"))
    return outcome
