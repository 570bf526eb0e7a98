"""The processes of a run and their groups: one process per rank, groups created once, in sorted order.

Strategies number ranks as the cluster does; torch.distributed numbers processes from 0. `World` holds the map.
"""

import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.program import Program
from hetero_megatron.runtime.launch import Rendezvous

Say = Callable[[str], None]
"""Who is told what a person should know."""


def silent(text: str) -> None:
    """A Say that says nothing: someone else says it, or has said it."""
    del text


@dataclass(frozen=True)
class World:
    """This process's rank among `ranks` (ascending), its device, and a gloo group for small host-side messages.

    Attributes:
        group: for collectives of these ranks on their device; torch's default group when None.
        processes: the ranks of all processes, where `ranks` are some of them; empty where they are all.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    control: dist.ProcessGroup
    timeout: datetime.timedelta
    group: dist.ProcessGroup | None = None
    processes: tuple[int, ...] = ()

    @staticmethod
    def join(
        rendezvous: Rendezvous | None, ranks: Sequence[int], device: torch.device, timeout_s: float = 600.0
    ) -> "World":
        """Connect to the other processes: over the rendezvous file, or by the launcher's environment when None.

        Raises:
            RuntimeFailure: the launcher started another number of processes than the strategy has ranks.
        """
        # Connections are made at first use: with many ranks and many groups this is seconds saved.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        if rendezvous is None:
            store, index, size = _launched(timeout)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            index, size = rendezvous.index, rendezvous.size
            store = dist.FileStore(rendezvous.store_path, size)
        dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
        return World._met(ranks, device, timeout)

    @staticmethod
    def over(
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        timeout_s: float = 600.0,
        local: bool = True,
    ) -> "World":
        """Connect to the other processes over a store of this run's own, with all connections made at once.

        `local`: all of them are on this machine.

        A connection that is made at first use does not show that its other end is gone until long after the time-out.
        """
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
        if local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ordered, timeout = sorted(ranks), datetime.timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=ordered.index(rank), world_size=len(ordered), timeout=timeout
        )
        return World._met(ordered, device, timeout)

    @staticmethod
    def _met(ranks: Sequence[int], device: torch.device, timeout: datetime.timedelta) -> "World":
        """The world once torch.distributed has started."""
        backend = dist.get_backend()
        if dist.get_world_size() != len(ranks):
            raise RuntimeFailure(
                f"{dist.get_world_size()} processes were started, the strategy has {len(ranks)} ranks; start one per rank"
            )
        ordered = tuple(sorted(ranks))
        group = dist.group.WORLD
        assert group is not None, "init_process_group leaves a default group"
        control = group if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        if backend == "nccl":
            # NCCL connects all ranks at a group's first operation. That must not be a send between two
            # stages: the ranks of other pipelines take no part in it, and the first step would hang.
            dist.all_reduce(torch.zeros(1, device=device))
        return World(ordered[dist.get_rank()], ordered, device, control, timeout)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which speaks and writes for all."""
        return self.rank == self.ranks[0]

    def once(self, say: Say) -> Say:
        """`say` on the first rank; on the others nothing is said."""
        return say if self.leads else silent

    def index(self, rank: int) -> int:
        """The torch.distributed index of `rank`."""
        return (self.processes or self.ranks).index(rank)

    def leave(self) -> None:
        """Close all connections."""
        dist.destroy_process_group()


def _launched(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """The launcher's store, this process's place in it, and how many there are.

    torchrun may keep one store over all its attempts, in which the addresses of processes that are gone would be found.
    """
    store, index, size = next(dist.rendezvous("env://", timeout=timeout))
    # Several agents do not count their attempts together.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, index, size


class Groups:
    """Process groups by ascending rank tuple; every process creates all of them in the same order."""

    def __init__(
        self, world: World, needed: Iterable[Sequence[int]], control: Iterable[Sequence[int]] = ()
    ) -> None:
        self.world = world
        self._created: set[tuple[int, ...]] = set()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._control: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.add(needed)
        if world.device.type == "cpu":
            self.add(control)
            self._control = self._groups
        else:
            for ranks in sorted({tuple(sorted(ranks)) for ranks in control if len(ranks) > 1}):
                group = world.control if ranks == world.ranks else self._new(ranks, "gloo")
                if isinstance(group, dist.ProcessGroup):
                    self._control[ranks] = group

    @staticmethod
    def of(world: World, programs: Sequence[Program]) -> "Groups":
        """Everything that these programs need, a group of all ranks of each among it; collective over all processes."""
        everyone = {tuple(sorted(program.strategy.ranks)) for program in programs}
        needed = {group for program in programs for group in program.groups}
        control = {group for program in programs for group in program.control_groups}
        return Groups(world, needed | everyone, control | everyone)

    def within(self, ranks: Sequence[int]) -> World:
        """The world of these ranks, which have a group: what a strategy that leaves some of the processes out works in."""
        world, ranks = self.world, tuple(sorted(ranks))
        if ranks == world.ranks:
            return world
        alone = len(ranks) == 1
        return replace(
            world,
            ranks=ranks,
            control=world.control if alone else self.control(ranks),
            group=None if alone else self[ranks],
            processes=world.ranks,
        )

    def add(self, needed: Iterable[Sequence[int]]) -> None:
        """Create the missing groups; collective over all processes, which pass the same set."""
        wanted = {tuple(sorted(ranks)) for ranks in needed if len(ranks) > 1}
        # Groups of other ranks count too: whoever left one out would name the next ones otherwise and hang.
        for ranks in sorted(wanted - self._created):
            self._created.add(ranks)
            group = dist.group.WORLD if ranks == self.world.ranks else self._new(ranks)
            if isinstance(group, dist.ProcessGroup):
                self._groups[ranks] = group

    def _new(self, ranks: tuple[int, ...], backend: str | None = None) -> object:
        """A group with the world's time-out; its own default would be 10 or 30 minutes."""
        return dist.new_group(
            [self.world.index(rank) for rank in ranks],
            timeout=self.world.timeout,
            backend=backend,
            group_desc=f"ranks {ranks}",
        )

    def __getitem__(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these ranks, in whatever order they are named.

        Raises:
            RuntimeFailure: there is none, or this process is no member.
        """
        return self._find(self._groups, "process group", ranks)

    def control(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group for host-side messages between `ranks`.

        Raises:
            RuntimeFailure: there is none, or this process is no member.
        """
        return self._find(self._control, "control group", ranks)

    def _find(
        self, groups: Mapping[tuple[int, ...], dist.ProcessGroup], what: str, ranks: Sequence[int]
    ) -> dist.ProcessGroup:
        ranks = tuple(sorted(ranks))
        if ranks not in groups:
            raise RuntimeFailure(
                f"rank {self.world.rank} is in no {what} of ranks {ranks}; it is in {sorted(groups)}"
            )
        return groups[ranks]

    @property
    def held(self) -> list[dist.ProcessGroup]:
        """The process groups of this process, that of the world among them."""
        found = [self.world.control, *self._groups.values(), *self._control.values()]
        return found if dist.group.WORLD is None else [*found, dist.group.WORLD]

    @property
    def created(self) -> tuple[tuple[int, ...], ...]:
        """The rank tuples that have a group, sorted; the same on every rank, members or not."""
        return tuple(sorted(self._created))
