"""Ports for servers that must be named before they listen."""

from __future__ import annotations

import contextlib
import random
import socket

# Connections that the system opens by itself take higher ones, between the choice and the use.
_RANGE = range(10_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 on which nothing listens."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.SystemRandom().choice(_RANGE)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]
