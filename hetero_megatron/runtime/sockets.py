"""The TCP connections of this process, and cutting those that a communication library will not close in time.

A library that waits for a peer does not close its connection to it, and the peer, if it waits too, never hears that
anything is wrong. A connection that is cut tells both ends within milliseconds.
"""

import contextlib
import os
import socket

Sockets = frozenset[tuple[int, str]]
"""File descriptors with what they name, so that one which was closed and reused is not taken for the old one."""


def open_sockets() -> Sockets:
    """All sockets of this process; none where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found.add((int(name), target))
    return frozenset(found)


def cut(sockets: Sockets) -> None:
    """End the traffic of these connections, for both sides, but leave them to their owner to close."""
    for number, _ in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as handle:
            # A library gives up when a socket on which it waits for connections fails.
            if not handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                handle.shutdown(socket.SHUT_RDWR)
