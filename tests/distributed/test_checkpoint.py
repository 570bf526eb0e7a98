"""Saved under one strategy, loaded under another: the run goes on as the one that never stopped (O-27, O-55, O-56)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.checkpoint import Saved, Saver
from hetero_megatron.runtime.checkpoint_parts import MASTER, MOMENTS
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Strategy
from tests.distributed.training import (
    T0,
    Outcome,
    assemble,
    assert_parity,
    build,
    het3,
    het4,
    sequences,
    stage,
    strategy,
    train,
)

BEFORE, AFTER = 2, 3
KINDS = (MASTER, *MOMENTS)
STEPS = [sequences(6, seed=step) for step in range(BEFORE + AFTER)]
PLANS = {
    "1 rank": strategy((1, 6, [stage("0", "0-3")])),
    "TP2": strategy((1, 6, [stage("0-1", "0-3")])),
    "PP3": strategy((3, 2, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")])),
    "HET3": het3(),
    "HET4": het4((2, 2), (1, 2)),
    "ZeRO-1 HET4": het4((2, 2), (1, 2), zero=1),
    "HET3 swapped": strategy((3, 2, [stage("0", "0"), stage("1-2", "1-3")])),
    "PP4": strategy((6, 1, [stage(str(rank), str(rank)) for rank in range(4)])),
    "TP2 x PP2": strategy((3, 2, [stage("0-1", "0-1"), stage("2-3", "2-3")])),
}
MATRIX = ("1 rank", "TP2", "PP3", "HET3", "HET4", "ZeRO-1 HET4")
PAIRS = [
    *((a, MATRIX[(place + step) % 6]) for place, a in enumerate(MATRIX) for step in (1, 2)),
    ("HET4", "1 rank"),
    ("HET4", "PP4"),
    ("HET4", "HET3 swapped"),
    ("HET4", "HET4"),
    ("TP2 x PP2", "HET3"),
]


@dataclass
class Course:
    """A run that saved after two steps and went on for three; what it held when it saved."""

    path: Path
    uninterrupted: Outcome
    held: Mapping[int, dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def course_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Courses by name of the strategy, each run once."""
    courses: dict[str, Course] = {}

    def find(name: str) -> Course:
        if name not in courses:
            courses[name] = run(PLANS[name], tmp_path_factory.mktemp("run"))
        return courses[name]

    return find


def run(plan: Strategy, folder: Path) -> Course:
    def save(session: Session, step: int) -> None:
        if step == BEFORE:
            saver = Saver(folder, session, asynchronous=False, say=lambda text: None)
            path = folder / "iter_0000002"
            assert saver.start(session.iteration, {"next sample": 12}) == Saved(2, path)
            held[session.world.rank] = session.shards()

    held: dict[int, Any] = {}
    outcome = train(plan, STEPS, before_step=save, collect=lambda session: held[session.world.rank])
    return Course(folder / "iter_0000002", outcome, outcome.extra)


def gathered(
    plan: Strategy, shards: Mapping[int, dict[str, dict[str, Tensor]]]
) -> dict[str, dict[str, Tensor]]:
    """Whole weights and moments; copies on several ranks have to be bit-equal."""
    kinds = ("parameter", *KINDS)
    kept = {
        rank: {
            name: {kind: tensors[kind] for kind in kinds if kind in tensors} for name, tensors in own.items()
        }
        for rank, own in shards.items()
    }
    return assemble(build(Llama(T0), plan), kept)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda name: name)
def test_a_run_goes_on_under_another_strategy_as_if_it_had_never_stopped(
    before: str, after: str, course_of: Any
) -> None:
    course = course_of(before)
    saved = SavedState.open(course.path)
    assert saved.payload == {"next sample": 12}
    loaded: dict[int, Any] = {}

    def look(session: Session, step: int) -> None:
        if not step:
            assert (session.iteration, session.state.step) == (BEFORE, BEFORE)
            loaded[session.world.rank] = session.shards()

    found = train(
        PLANS[after],
        STEPS[BEFORE:],
        saved=saved,
        before_step=look,
        collect=lambda session: (loaded[session.world.rank], session.iteration, session.state.step),
    )
    assert {(iteration, step) for _, iteration, step in found.extra.values()} == {(5, 5)}
    by_rank = {rank: shards for rank, (shards, _, _) in found.extra.items()}
    held, got = gathered(PLANS[before], course.held), gathered(PLANS[after], by_rank)
    assert held.keys() == got.keys()
    for name, tensors in held.items():
        assert tensors.keys() == got[name].keys() == {"parameter", *KINDS}
        for kind, tensor in tensors.items():
            assert torch.equal(got[name][kind], tensor), f"{kind} of {name}"
    wanted = course.uninterrupted
    wanted = Outcome(wanted.losses[BEFORE:], wanted.norms[BEFORE:], tensors=wanted.tensors)
    assert_parity(found, wanted)


def test_a_plain_reader_of_the_format_makes_whole_tensors_of_it(course_of: Any) -> None:
    """`dcp.load` knows nothing of this library, and reads what four ranks with cut states have written."""
    course = course_of("ZeRO-1 HET4")
    held = gathered(PLANS["ZeRO-1 HET4"], course.held)
    plain = {kind: {name: torch.zeros_like(held[name][kind]) for name in held} for kind in KINDS}
    dcp.load(plain, checkpoint_id=course.path, no_dist=True)
    for name, tensors in held.items():
        for kind in KINDS:
            assert torch.equal(plain[kind][name], tensors[kind]), f"{kind} of {name}"


def test_any_box_of_a_tensor_can_be_read(course_of: Any) -> None:
    saved = SavedState.open(course_of("ZeRO-1 HET4").path)
    assert saved.shape("layers.1.gate.weight") == (64, 32)
    whole = saved.read("layers.1.gate.weight", "exp_avg")
    assert whole.shape == (64, 32)
    assert whole.abs().min() > 0
    box = saved.read("layers.1.gate.weight", "exp_avg", ((13, 57), (5, 31)))
    assert torch.equal(box, whole[13:57, 5:31])
    assert saved.read("layers.1.gate.weight", "master", ((7, 7), (0, 32))).shape == (0, 32)
