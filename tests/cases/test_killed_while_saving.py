"""SIGKILL in the middle of a save, of one rank or of all, again and again (O-57)."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.checkpoint import Saved, Saver
from hetero_megatron.runtime.checkpoint_choice import choose, verify
from hetero_megatron.runtime.checkpoint_files import finished, unfinished
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks, preload
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from tests.distributed.saving import DP2, Run
from tests.distributed.training import ADAM, T0, build, start

# Half a million weights and their moments, 7 MB: most of the time of a run goes into its saves.
CONFIG = dataclasses.replace(T0, vocab_size=8_000)
KILLS = 20


class Killer(threading.Thread):
    """Waits for a save that has begun and not ended, and kills ranks at a random moment of it."""

    def __init__(self, folder: Path, pids: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._pids, self._random = folder, pids, random.Random(seed)
        self._newest = max(finished(folder), default=0)
        self.killed: tuple[int, ...] = ()
        self.was_saving = False
        self.over = threading.Event()

    def run(self) -> None:
        kill_all = self._random.random() < 0.5
        saves, delay = (
            self._random.choice([1, 2] if not self._newest else [0, 1, 2]),
            self._random.uniform(0, 0.03),
        )
        self._wait(lambda: len(list(self._pids.iterdir())) == 2)
        self._wait(lambda: max(finished(self._folder), default=0) >= self._newest + saves)
        time.sleep(delay)
        self._wait(lambda: bool(unfinished(self._folder)))
        self.was_saving = bool(unfinished(self._folder))
        pids = [int(file.read_text()) for file in sorted(self._pids.iterdir())]
        self.killed = tuple(pids if kill_all else [self._random.choice(pids)])
        for pid in self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not self.over.is_set() and not condition():
            time.sleep(0.0005)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of two ranks that save every step, until they are killed or have made `steps`."""

    folder: Path
    losses: Path
    pids: Path
    saved: SavedState | None
    asynchronous: bool
    steps: int

    def on_rank(self, model: Llama, program: Program, rendezvous: Rendezvous) -> None:
        world = World.join(rendezvous, (0, 1), torch.device("cpu"), 30)
        session = start(model, program, world, ADAM, torch.float32, 7, saved=self.saved)
        run = Run(world, session, self.saver)
        written = self.pids.with_suffix(f".{world.rank}")
        written.write_text(str(os.getpid()))
        written.rename(self.pids / str(world.rank))
        for _ in range(self.steps):
            ended = run.step()
            if world.rank == 0:
                with self.losses.open("a") as file:
                    file.write(json.dumps([session.iteration, run.losses[session.iteration]]) + "\n")
            ended = run.save() or ended
            assert ended is None or isinstance(ended, Saved), ended
        run.saver.finish()
        world.leave()

    def saver(self, session: Session) -> Saver:
        return Saver(self.folder, session, 2, self.asynchronous, say=lambda text: None)


def test_every_restart_finds_a_complete_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    folder, losses = tmp_path / "run", tmp_path / "losses.jsonl"
    torch.set_num_threads(1)
    preload(recompute=False)
    model = Llama(CONFIG)
    program = build(model, dataclasses.replace(DP2, zero=1))
    inside, said = 0, []
    for number in range(KILLS):
        attempt, newest = prepare(number, folder, losses, tmp_path / f"pids-{number}", said), finished(folder)
        killer = Killer(folder, attempt.pids, number)
        killer.start()
        code = fork_ranks(2, partial(attempt.on_rank, model, program), 30)
        killer.over.set()
        killer.join()
        assert code == 128 + signal.SIGKILL, f"attempt {number}: exit code {code}"
        inside += killer.was_saving
        assert max(finished(folder)) >= max(newest, default=0)
    attempt = dataclasses.replace(prepare(KILLS, folder, losses, tmp_path / "pids", said), steps=3)
    assert fork_ranks(2, partial(attempt.on_rank, model, program), 30) == 0
    assert inside >= KILLS - 3, f"kills have to come inside a save, and only {inside} did"
    assert any("the rest of a save that was never finished" in text for text in said)
    assert unfinished(folder) == (), "the next save removes what was left"
    assert len(finished(folder)) == 2
    found: dict[int, set[float]] = {}
    for line in losses.read_text().splitlines():
        iteration, loss = json.loads(line)
        found.setdefault(iteration, set()).add(loss)
    assert sorted(found) == list(range(1, max(found) + 1))
    # A step that was made again after a restart has the loss it had before, to the last bit.
    assert all(len(values) == 1 for values in found.values()), found


def prepare(number: int, folder: Path, losses: Path, pids: Path, said: list[str]) -> Attempt:
    """The next start, from the newest complete checkpoint: there has to be one, and it has to be whole."""
    pids.mkdir()
    path = choose(folder, "auto", said.append)
    if number:
        assert path == list(finished(folder).values())[-1], f"attempt {number}: {said}"
        verify(path, checksums=True)
    saved = SavedState.open(path) if path else None
    return Attempt(folder, losses, pids, saved, asynchronous=number % 2 == 0, steps=1000)
