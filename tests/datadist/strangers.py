"""What somebody without the token does to the port of a PROMPT; importable in processes without pytest."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import sides

from quire.datadist.wire.handshake import ConnectionKind, new_greeting

NUM_CONNECTIONS = 300  # more than may be half-open
LINGER_NOTHING = struct.pack("ii", 1, 0)  # closing then resets the connection


def garbage(address: tuple[str, int], seed: int) -> None:
    """Send random bytes, and greetings with random bytes in them, and leave in different ways."""
    choose = random.Random(seed)
    for _ in range(20):
        kind = choose.choice(list(ConnectionKind))
        greeting = bytearray(new_greeting(kind, 0, choose.getrandbits(64)).encode())
        for _ in range(choose.randrange(3)):
            greeting[choose.randrange(len(greeting))] = choose.randrange(256)
        data = choose.choice([choose.randbytes(choose.randrange(1, 5000)), bytes(greeting)])
        with socket.create_connection(address, timeout=5) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            if choose.random() < 0.5:
                connection.settimeout(0.1)
                connection.recv(1000)
            if choose.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOTHING)


def half_open(address: tuple[str, int], seed: int) -> None:
    """Connect more often than there are places, say nothing or half of a greeting, and leave."""
    choose = random.Random(seed)
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(address, timeout=5))
            with contextlib.suppress(OSError):  # it had to give way already
                connection.sendall(new_greeting(ConnectionKind.CONTROL).encode()[: choose.randrange(50)])


def link_with(token: str, address: tuple[str, int], timeout: int) -> str:
    """Link as a DECODER that has a token, and the id of another; return the code's name."""
    decoder = sides.start_decoder(2, token=token)
    try:
        overall, _ = decoder.link_clusters([sides.cluster_info(1, address[1], address[0])], timeout)
        return overall.name
    finally:
        decoder.finalize()
