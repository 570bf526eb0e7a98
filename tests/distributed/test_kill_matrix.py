"""A rank may be killed at any moment: every phase of a step, every stage, with and without ZeRO-1.

`pytest -m fuzz tests/distributed/test_kill_matrix.py` makes all of it; without it a diagonal is made.
"""

import os
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.trace import trace
from hetero_megatron.losses import guardians, survivable
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.faults import Fault
from hetero_megatron.runtime.launch import preload
from tests.distributed.surviving import Survival, survive
from tests.distributed.training import T0, Outcome, assert_parity, reference, sequences, stage, strategy
from tests.whole import all_are_asked_for

DATA = tuple(sequences(4, seed=step) for step in range(5))
STEP = 3
# Rank 0, 1 and 2 are the first, middle and last stage of a pipeline; others have the whole model.
STAGES = (0, 1, 2)
# Whether a step counts when a rank is killed then.
PHASES = {
    "forward": False,
    "backward": False,
    "gradient sync": False,
    "agreement": False,
    "committed": True,
    "update": True,
    "parameter gather": True,
    "between two steps": False,
    "saving": True,
    "switching": False,
}
MATRIX = list(product(PHASES, STAGES, (0, 1)))
DIAGONAL = [
    ("backward", 0, 0),
    ("committed", 1, 0),
    ("gradient sync", 1, 1),
    ("update", 0, 1),
    ("forward", 2, 1),
    ("saving", 2, 1),
    ("switching", 1, 1),
]


def plan(zero: int, whole: int = 1):  # type: ignore[no-untyped-def]
    """A pipeline of ranks 0, 1 and 2, and `whole` pipelines of one rank with all layers."""
    stages = [stage("0", "0-0"), stage("1", "1-2"), stage("2", "3")]
    others = [(1, 1, [stage(str(rank), "0-3")]) for rank in range(3, 3 + whole)]
    return strategy((4 - whole, 1, stages), *others, zero=zero)


@cache
def undisturbed() -> Outcome:
    return reference(DATA)


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def assert_went_on(found: Survival, lost: set[int]) -> None:
    """All but the lost ranks ended well in their first process, with the undisturbed run's losses, weights and samples."""
    assert found.code == 0
    assert found.pids == {rank: pid for rank, pid in found.first_pids.items() if rank not in lost}
    assert_parity(found.outcome, undisturbed())
    assert [result.iteration for result in found.outcome.results] == list(range(1, len(DATA) + 1))
    for pid in found.first_pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for iteration in range(STEP + 1, len(DATA) + 1):
        took = dict(seen[iteration] for seen in found.seen.values() if iteration in seen)
        assert sorted(row for rows in took.values() for row in rows) == [0, 1, 2, 3]


def lost_before(zero: int, rank: int) -> int:
    """A rank that can be lost together with `rank`, first."""
    model = Llama(T0)
    program = Program.build(trace(model), plan(zero, 2), T0.facts, Cluster.local_cpu(5))
    kept = guardians(program) if zero else {}
    fatal = survivable(program, kept).pairs
    return next(
        other for other in (4, 3, 2, 1, 0) if other != rank and tuple(sorted((rank, other))) not in fatal
    )


def killed_in(phase: str, rank: int, zero: int, folder: Path) -> None:
    before = shared_memory()
    faults, lost, whole = [Fault("kill", rank, STEP, phase, 2 if phase == "saving" else 1)], {rank}, 1
    if phase == "switching":
        # Amid the moves of the recovery from another loss.
        other, whole = lost_before(zero, rank), 2
        faults = [
            Fault("kill", other, STEP, "backward"),
            Fault("kill", rank, STEP - 1, "switching", occurrence=2),
        ]
        lost |= {other}
    found = survive(plan(zero, whole), DATA, faults, copies=bool(zero), saving=phase == "saving")
    assert_went_on(found, lost)
    recoveries = next(iter(found.recoveries.values()))
    assert len(recoveries) == 1, "what a recovery was interrupted by is the next one's"
    (recovery,) = recoveries
    assert recovery.view.generation == len(faults)
    assert recovery.view.lost[rank].startswith(f"rank {rank} was killed by SIGKILL")
    # What is written by a thread meets the next step wherever it is.
    if phase != "saving":
        assert recovery.iteration == (STEP if PHASES[phase] else STEP - 1)
    assert set(recovery.seconds) >= {"detect", "agree", "plan", "groups", "specialize", "move", "redo"}
    if phase == "saving":
        assert found.saved[-1] == len(DATA)
        assert found.unsaved == []
    assert not list(folder.iterdir())
    pids = [str(pid) for pid in found.first_pids.values()]
    assert not [name for name in shared_memory() - before if any(pid in name for pid in pids)]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of this process and its ranks go, but for what torch's own imports leave."""
    undisturbed()
    preload(recompute=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("phase", "rank", "zero"), DIAGONAL)
def test_a_rank_that_is_killed_is_missed_by_nobody(phase: str, rank: int, zero: int, temporary: Path) -> None:
    killed_in(phase, rank, zero, temporary)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The whole matrix, where it is asked for."""
    if "case" in metafunc.fixturenames:
        asked = all_are_asked_for(metafunc.config)
        rest = [case for case in MATRIX if case not in DIAGONAL]
        metafunc.parametrize("case", rest if asked else [], ids=lambda case: "-".join(map(str, case)))


@pytest.mark.fuzz
def test_every_phase_and_stage_may_lose_its_rank(case: tuple[str, int, int], temporary: Path) -> None:
    killed_in(*case, temporary)
