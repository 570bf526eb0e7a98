"""Who belongs to a run: views by generation, agreed on over a store that no rank hosts.

When a connection fails, every rank stops, says how far it is and waits. The coordinator, which is the supervisor of
the first node, publishes the next view once every member has either said so or is gone. A view also says which
step was the last that counts: the furthest that any survivor has seen agreed on by all.
"""

import contextlib
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.board import Board

_POLL_SECONDS = 0.002
# While nothing trains yet nobody is in a hurry, and many ranks keep the store busy.
_ENTRY_SECONDS = 0.02
_PATIENCE = timedelta(hours=1)


class Halted(RuntimeError):
    """Somebody of this generation was lost while this rank waited for the others."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is.

    Attributes:
        iteration: steps that it knows to be agreed on by all; -1 of a rank without a part in the strategy.
        agreed: the numbers of the last of these agreements, if it made it since its state was put in place.
        base: the generation whose layout its state is complete in, as it knows of all ranks.
        skipped, optimizer_steps: counters at `iteration`.
        noticed: what made it stop.
        at: when it noticed, and when it had closed its connections (`time.time`).
    """

    iteration: int
    agreed: tuple[float, ...] | None = None
    base: int = 0
    skipped: int = 0
    optimizer_steps: int = 0
    noticed: str = ""
    at: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class View:
    """The members of one generation, and from where they go on.

    Attributes:
        ranks: ascending, those that joined included.
        lost: members of the generation before that are gone, why by rank.
        joined: ranks that hold nothing of what the others have in the layout of `base`.
        iteration: the last step that counts; `agreed` are its numbers, with which a rank that has not heard of
            them makes its update.
        base: the generation whose layout the state is in.
        at: when the first loss was known, when all had stopped, and when this view was made (`time.time`).
    """

    generation: int
    ranks: tuple[int, ...]
    lost: Mapping[int, str] = field(default_factory=dict)
    joined: tuple[int, ...] = ()
    iteration: int = 0
    agreed: tuple[float, ...] | None = None
    base: int = 0
    skipped: int = 0
    optimizer_steps: int = 0
    at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    end: str = ""

    def to_json(self) -> str:
        """As text; floats keep every bit."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "View":
        """Back from text."""
        values = json.loads(text)
        first, stopped, made = values["at"]
        return View(
            **values
            | {
                "ranks": tuple(values["ranks"]),
                "lost": {int(rank): why for rank, why in values["lost"].items()},
                "joined": tuple(values["joined"]),
                "agreed": None if values["agreed"] is None else tuple(values["agreed"]),
                "at": (first, stopped, made),
            }
        )


def connect(host: str, port: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """A client of the store."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


class Member:
    """A rank's part in the agreement."""

    def __init__(self, rank: int, address: tuple[str, int], board: Board, place: int) -> None:
        """Nothing is connected yet; `place` is the rank's on the board of its node."""
        self.rank, self._address, self._board, self._place = rank, address, board, place
        self._store: dist.TCPStore | None = None
        self.view = View(0, ())

    @property
    def store(self) -> dist.TCPStore:
        """This process's connection to the store, made at first use."""
        if self._store is None:
            self._store = self.connect()
        return self._store

    def connect(self) -> dist.TCPStore:
        """Another connection to the store."""
        return connect(*self._address)

    def enter(self) -> View | None:
        """Begin to show signs of life; the first view that has this rank, None where training is over before."""
        # What exists by now will not be looked at when connections are collected in a hurry.
        gc.freeze()
        self._board.start_pulse(self._place)
        if not self._comes(f"enter/{self.rank}"):
            return None
        generation = int(self.store.get(f"enter/{self.rank}"))
        if not self._comes(f"view/{generation}"):
            return None
        self.view = self._wait(generation)
        return self.view

    def _comes(self, key: str) -> bool:
        """Whether there is such a key before training is over."""
        while not self.store.check([key]):
            if self.store.check(["trained"]):
                return False
            time.sleep(_ENTRY_SECONDS)
        return True

    def note(self, phase: str, iteration: int) -> None:
        """Where this rank is now."""
        self._board.note(self._place, phase, iteration)

    def stop(self, progress: Progress) -> View:
        """This rank has closed its connections: say how far it is and wait for the next view.

        Raises:
            RuntimeFailure: the run ends here, and why.
        """
        generation = self.view.generation
        self.store.set(f"stopped/{generation}/{self.rank}", json.dumps(asdict(progress)))
        tell(self.store)
        self.view = self._wait(generation + 1)
        return self.view

    def is_halted(self) -> bool:
        """Whether somebody of this generation has stopped or is gone."""
        return bool(self.store.check([f"halt/{self.view.generation}"]))

    def wait_for_all(self, what: str, ranks: Sequence[int]) -> None:
        """Collective: until all `ranks` have come to the point `what` of this generation.

        Raises:
            Halted: one of them was lost before.
        """
        prefix = f"{what}/{self.view.generation}"
        self.store.set(f"{prefix}/{self.rank}", "")
        self._wait_unless_halted([f"{prefix}/{rank}" for rank in ranks])

    def share(self, what: str, value: str | None, generation: int | None = None) -> str:
        """Of one rank of a generation, which has the value: told to the others, who wait for it and for later ones.

        Raises:
            Halted: a rank of this generation was lost before.
        """
        key = f"{what}/{self.view.generation if generation is None else generation}"
        if value is not None:
            self.store.set(key, value)
            return value
        self._wait_unless_halted([key])
        return self.store.get(key).decode()

    def _wait_unless_halted(self, keys: Sequence[str]) -> None:
        keys = list(keys)
        while not self.store.check(keys):
            if self.is_halted():
                raise Halted("another rank was lost while this one waited")
            time.sleep(self._pause)

    def wait_for_work(self) -> bool:
        """Of a rank without a part in the strategy: wait until the view changes (True) or training is over."""
        while True:
            if self.is_halted():
                return True
            if self.store.check(["trained"]):
                return False
            time.sleep(self._pause)

    def view_of(self, generation: int) -> View:
        """An earlier view."""
        return View.from_json(self.store.get(f"view/{generation}"))

    def end(self, ranks: Sequence[int]) -> bool:
        """This rank has done its work: wait until all `ranks` have (True), or until one is lost before it could."""
        prefix = f"ended/{self.view.generation}"
        self.store.set(f"{prefix}/{self.rank}", "")
        keys = [f"{prefix}/{rank}" for rank in ranks]
        while not self.store.check(keys):
            if self.is_halted():
                return False
            time.sleep(self._pause)
        self.store.set("trained", "")
        return True

    def is_awaited(self) -> bool:
        """Whether somebody wants to join."""
        return bool(self.store.check([f"joining/{self.view.generation}"]))

    def refuse(self, why: str) -> None:
        """This rank ends the run for all."""
        self.store.set("refused", why)
        tell(self.store)

    def _wait(self, generation: int) -> View:
        key = f"view/{generation}"
        self._wait_for(key)
        view = View.from_json(self.store.get(key))
        if view.end:
            raise RuntimeFailure(view.end)
        return view

    def _wait_for(self, key: str) -> None:
        """Until the store has `key`, which then answers by itself: many ranks that ask again and again keep it busy."""
        while not self.store.check([key]):
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([key], _PATIENCE)

    @property
    def _pause(self) -> float:
        """Seconds between two questions to the store, which answers all ranks one after another."""
        return _POLL_SECONDS * max(1, len(self.view.ranks) // 4)


def tell(store: dist.Store) -> None:
    """Something has changed that the coordinator has to look at."""
    store.add("events", 1)


class Coordinator:
    """Makes the views; in one process, the supervisor of the first node."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], patience_s: float = 0.5) -> None:
        """`patience_s`: how long a run in which all have stopped is waited with until somebody is found gone."""
        self._store, self._patience = store, patience_s
        self._events, self._gone, self._first, self._stopped_at = 0, dict[int, str](), 0.0, 0.0
        self._joining: list[int] = []
        self._stopped = set[int]()
        self._without_progress = 0
        self.view = View(0, tuple(sorted(ranks)))
        for rank in ranks:
            store.set(f"enter/{rank}", "0")
        self._publish(self.view)

    def _publish(self, view: View) -> None:
        self.view = view
        self._store.set(f"view/{view.generation}", view.to_json())

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone."""
        if rank not in self._gone:
            self._gone[rank] = why
            self._halt()

    def join(self, ranks: Sequence[int]) -> None:
        """Ranks that wait to be taken in at the next step boundary."""
        self._joining += ranks
        for rank in ranks:
            self._gone.pop(rank, None)
        self._store.set(f"joining/{self.view.generation}", "")

    def _halt(self) -> None:
        self._first = self._first or time.time()
        self._store.set(f"halt/{self.view.generation}", "")

    def waiting_for(self) -> tuple[int, ...]:
        """Members that have neither stopped nor gone, once somebody has; nobody while the run goes on."""
        if not self._first:
            return ()
        left = [rank for rank in self.view.ranks if rank not in self._gone and rank not in self._stopped]
        # Each is asked about until it has stopped, and no longer: with many ranks that is most of the work.
        self._stopped |= {rank for rank in left if self._store.check([self._key(rank)])}
        return tuple(rank for rank in left if rank not in self._stopped)

    @property
    def halted_at(self) -> float:
        """When the first member of this generation was known to have stopped or gone; 0 while the run goes on."""
        return self._first

    def _key(self, rank: int) -> str:
        return f"stopped/{self.view.generation}/{rank}"

    def poll(self) -> View | None:
        """Look at what has changed; the next view, when it can be made."""
        events = self._store.add("events", 0)
        if events != self._events:
            self._events = events
            if any(self._store.check([self._key(rank)]) for rank in self.view.ranks):
                self._halt()
        if not self._first or self.waiting_for():
            return None
        self._stopped_at = self._stopped_at or time.time()
        gone = tuple(rank for rank in self.view.ranks if rank in self._gone)
        joins = self._joining and not gone
        if not gone and not joins and time.time() - self._stopped_at < self._patience:
            return None
        return self._next()

    def _next(self) -> View:
        old = self.view
        survivors = [rank for rank in old.ranks if rank not in self._gone]
        told = {rank: Progress(**json.loads(self._store.get(self._key(rank)))) for rank in survivors}
        came = set(self._joining) - set(survivors) - set(self._gone)
        held = [each for each in told.values() if each.iteration >= 0]
        base = max((each.base for each in held), default=0)
        # Whoever joined a generation whose layout was never complete holds nothing still.
        still = set(old.joined) & set(survivors) if base != old.generation else set[int]()
        end = ""
        if not held:
            end = "nobody who is left holds a part of the model"
        furthest = max(held, key=lambda each: (each.iteration, each.agreed is not None), default=Progress(0))
        moved = furthest.iteration > old.iteration or came
        self._without_progress = 0 if moved else self._without_progress + 1
        if self._without_progress > 5:
            end = f"{self._without_progress} times in a row ranks have stopped without having made a step"
        view = View(
            old.generation + 1,
            tuple(sorted((*survivors, *came))),
            {rank: self._gone[rank] for rank in old.ranks if rank in self._gone},
            tuple(sorted(came | still)),
            furthest.iteration,
            None if furthest.agreed is None else tuple(furthest.agreed),
            base,
            furthest.skipped,
            furthest.optimizer_steps,
            (self._first, self._stopped_at, time.time()),
            end,
        )
        self._first = self._stopped_at = 0.0
        self._joining, self._stopped = [], set()
        for rank in came:
            self._store.set(f"enter/{rank}", str(view.generation))
        self._publish(view)
        return view
