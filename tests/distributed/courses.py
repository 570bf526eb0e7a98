"""Runs that save on their way and go on, and runs that start from what was saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.checkpoint import Saved, Saver
from hetero_megatron.runtime.checkpoint_files import folder_of
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, Outcome, StepData, assemble, assert_parity, build, train

KINDS = (MASTER, *MOMENTS)
Shards = Mapping[int, dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class Course:
    """A run of all `steps` that saved before step `before`, and what its ranks held then."""

    plan: Strategy
    config: LlamaConfig
    steps: Sequence[StepData]
    before: int
    path: Path
    outcome: Outcome
    held: Shards

    @property
    def rest(self) -> Outcome:
        """What the run did after it had saved."""
        outcome = self.outcome
        return replace(outcome, losses=outcome.losses[self.before :], norms=outcome.norms[self.before :])


def run_course(
    plan: Strategy,
    steps: Sequence[StepData],
    before: int,
    folder: Path,
    config: LlamaConfig = T0,
    asynchronous: bool = True,
    **options: Any,
) -> Course:
    """Train on all steps, saving before step number `before` (from 0)."""
    held: dict[int, Any] = {}

    def save(session: Session, step: int) -> None:
        if step == before:
            saver = Saver(folder, session, asynchronous=asynchronous, say=lambda text: None)
            ended = saver.start(before, {"next step": before})
            assert (ended is None) == asynchronous
            assert (ended or saver.finish()) == Saved(before, folder_of(folder, before))
            held[session.world.rank] = session.shards()

    outcome = train(
        plan, steps, config, before_step=save, collect=lambda session: held[session.world.rank], **options
    )
    return Course(plan, config, steps, before, folder_of(folder, before), outcome, outcome.extra)


def go_on(course: Course, plan: Strategy, **options: Any) -> Outcome:
    """The rest of the steps under another strategy; the state it starts with and its counters are checked.

    Weights, moments and step counts are those that were saved, to the last bit, and copies are equal.
    """
    loaded: dict[int, Any] = {}

    def look(session: Session, step: int) -> None:
        if not step:
            assert (session.iteration, session.state.step) == (course.before, course.before)
            loaded[session.world.rank] = session.shards()

    def collect(session: Session) -> Any:
        return loaded[session.world.rank], session.iteration, session.state.step

    saved = SavedState.open(course.path)
    rest = course.steps[course.before :]
    found = train(plan, rest, course.config, saved=saved, before_step=look, collect=collect, **options)
    total = len(course.steps)
    assert {(iteration, step) for _, iteration, step in found.extra.values()} == {(total, total)}
    held = gathered(course.plan, course.held, course.config)
    got = gathered(plan, {rank: shards for rank, (shards, _, _) in found.extra.items()}, course.config)
    assert held.keys() == got.keys()
    for name, tensors in held.items():
        assert tensors.keys() == got[name].keys() == {"parameter", *KINDS}
        for kind, tensor in tensors.items():
            assert torch.equal(got[name][kind], tensor), f"{kind} of {name}"
    return found


def assert_as_if_never_stopped(course: Course, plan: Strategy, **options: Any) -> Outcome:
    """PARITY of the steps after the save with the run that went on."""
    found = go_on(course, plan, **options)
    assert_parity(found, course.rest)
    return found


def gathered(plan: Strategy, shards: Shards, config: LlamaConfig = T0) -> dict[str, dict[str, Tensor]]:
    """Whole weights and moments; copies on several ranks have to be bit-equal."""
    kinds = ("parameter", *KINDS)
    kept = {
        rank: {
            name: {kind: tensors[kind] for kind in kinds if kind in tensors} for name, tensors in own.items()
        }
        for rank, own in shards.items()
    }
    return assemble(build(Llama(config), plan), kept)
