"""The ranks of a view connect to one another, and give up at once when one of them is lost meanwhile.

Whoever waits for a rank that never comes would wait for the time limit: in the store for its address, or for its
connection. So all first meet where waiting can be left, and a thread cuts what is being made when the view is over.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero_megatron.program import Program
from hetero_megatron.runtime.launch import is_peer_failure
from hetero_megatron.runtime.membership import Halted, Member, View
from hetero_megatron.runtime.sockets import Sockets, cut, open_sockets
from hetero_megatron.runtime.world import Groups, World

_WATCH_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Meeting:
    """The world and groups of a view, and the connections that they are made of."""

    world: World
    groups: Groups
    sockets: Sockets


def meet(
    member: Member,
    view: View,
    program: Program,
    device: torch.device,
    timeout_s: float,
    local: bool,
    stage: Callable[[], None],
) -> Meeting:
    """Collective over the view's ranks: connect, and make the groups of a program.

    `stage` is called before all are there, when all are, and when they are connected.

    Raises:
        Halted: a rank of the view was lost before all were there.
        RuntimeError: one was lost later, as the communication library words it; inside `cut_when_halted`, at once.
    """
    before = open_sockets()
    # A connection of its own: one that waits answers nobody else, and is not to be missed when it is cut.
    store = dist.PrefixStore(f"world/{view.generation}", member.connect())
    stage()
    member.wait_for_all("ready", view.ranks)
    stage()
    world = World.over(store, member.rank, view.ranks, device, timeout_s, local)
    stage()
    groups = Groups.of(world, [program])
    return Meeting(world, groups, open_sockets() - before)


@contextlib.contextmanager
def cut_when_halted(member: Member) -> Iterator[None]:
    """Cut all connections made inside as soon as the member's view is over.

    Raises:
        Halted: in place of what failed because of that.
    """
    before, done, is_cut = open_sockets(), threading.Event(), threading.Event()

    def watch() -> None:
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            while not done.wait(_WATCH_SECONDS):
                if member.is_halted():
                    is_cut.set()
                    cut(open_sockets() - before)
                    return

    thread = threading.Thread(target=watch, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        if is_cut.is_set() and is_peer_failure(error):
            raise Halted("another rank was lost while this one took up its work") from error
        raise
    finally:
        done.set()
        thread.join()
