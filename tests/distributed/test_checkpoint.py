"""Saved under one strategy, loaded under another: the run goes on as the one that never stopped (O-55)."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hetero_megatron.runtime.checkpoint_read import SavedState
from tests.distributed.courses import KINDS, Course, assert_as_if_never_stopped, gathered, run_course
from tests.distributed.training import het3, het4, sequences, stage, strategy

STEPS = [sequences(6, seed=step) for step in range(5)]
PLANS = {
    "1 rank": strategy((1, 6, [stage("0", "0-3")])),
    "TP2": strategy((1, 6, [stage("0-1", "0-3")])),
    "PP3": strategy((3, 2, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")])),
    "HET3": het3(),
    "HET4": het4((2, 2), (1, 2)),
    "ZeRO-1 HET4": het4((2, 2), (1, 2), zero=1),
    "HET3 swapped": strategy((3, 2, [stage("0", "0"), stage("1-2", "1-3")])),
    "PP4": strategy((6, 1, [stage(str(rank), str(rank)) for rank in range(4)])),
}
MATRIX = ("1 rank", "TP2", "PP3", "HET3", "HET4", "ZeRO-1 HET4")
PAIRS = [
    *((name, MATRIX[(place + step) % 6]) for place, name in enumerate(MATRIX) for step in (1, 2)),
    ("HET4", "TP2"),
    ("HET4", "PP4"),
    ("HET4", "HET3 swapped"),
    ("HET4", "HET4"),
]


@pytest.fixture(scope="module")
def course_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Course]:
    """Courses of five steps by name of the strategy, saved after two; each is run once."""
    courses: dict[str, Course] = {}

    def find(name: str) -> Course:
        if name not in courses:
            courses[name] = run_course(PLANS[name], STEPS, 2, tmp_path_factory.mktemp("run"))
        return courses[name]

    return find


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda name: name)
def test_a_run_goes_on_under_another_strategy_as_if_it_had_never_stopped(
    before: str, after: str, course_of: Callable[[str], Course]
) -> None:
    assert_as_if_never_stopped(course_of(before), PLANS[after])


def test_a_plain_reader_of_the_format_makes_whole_tensors_of_it(course_of: Callable[[str], Course]) -> None:
    """`dcp.load` knows nothing of this library, and reads what four ranks with cut states have written."""
    course = course_of("ZeRO-1 HET4")
    held = gathered(course.plan, course.held)
    plain = {kind: {name: torch.zeros_like(held[name][kind]) for name in held} for kind in KINDS}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(plain, checkpoint_id=course.path, no_dist=True)
    for name, tensors in held.items():
        for kind in KINDS:
            assert torch.equal(plain[kind][name], tensors[kind]), f"{kind} of {name}"


def test_any_box_of_a_tensor_can_be_read(course_of: Callable[[str], Course]) -> None:
    saved = SavedState.open(course_of("ZeRO-1 HET4").path)
    assert saved.payload == {"next step": 2}
    assert saved.shape("layers.1.gate.weight") == (64, 32)
    whole = saved.read("layers.1.gate.weight", "exp_avg")
    assert whole.shape == (64, 32)
    assert whole.abs().min() > 0
    box = saved.read("layers.1.gate.weight", "exp_avg", ((13, 57), (5, 31)))
    assert torch.equal(box, whole[13:57, 5:31])
    assert saved.read("layers.1.gate.weight", "master", ((7, 7), (0, 32))).shape == (0, 32)


def test_copies_are_written_once(course_of: Callable[[str], Course]) -> None:
    """Two pipelines hold everything twice; the files have every element once."""
    course = course_of("HET4")
    entries = SavedState.open(course.path).metadata.state_dict_metadata
    elements = sum(chunk.sizes.numel() for entry in entries.values() for chunk in entry.chunks)  # type: ignore[union-attr]
    assert elements == 3 * 43_296
