"""Attacks with what is below requests: connections, half of them, slow ones, and many requests on one.

    python benchmarks/attacking_connections.py NAME PORT

runs one attack on a server of this machine once standard input has a line, and prints as JSON how often the
attacker saw what: statuses, and connections that were closed without an answer or still open at the end.
`attacks.py` runs it as a process of its own, so that it does not delay what that measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

HOLD = 15.0  # seconds for which slow clients go on; longer than the server's default time for a header
BYTE_INTERVAL = 1.0  # seconds between two bytes of a slow client
MOST = 60.0  # seconds after which an answer counts as none

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclasses.dataclass(frozen=True)
class ConnectionAttack:
    """One attack.

    Args:
        run: does it to the server at a port; returns how often it saw what.
        max_descriptors: that the server may have, all in all; None: as many as the system permits.
    """

    run: Callable[[int], Awaitable[Counter[str]]]
    max_descriptors: int | None = None


async def _one_byte_chunks(port: int) -> Counter[str]:
    """Send a body of two million chunks."""
    text = json.dumps({"model": "mini", "prompt": "a", "max_tokens": 1})
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text.encode().ljust(2_000_000))
    return await _answers(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", 1)


async def _pipelined(port: int) -> Counter[str]:
    """Send 30,000 requests on one connection before the first answer is read."""
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return await _answers(port, request * 30_000, 30_000)


async def _answers(port: int, sent: bytes, number: int) -> Counter[str]:
    """Send something on one connection and count this many answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    seen: Counter[str] = Counter()
    try:
        async with asyncio.timeout(MOST):
            for _ in range(number):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                seen[head.split()[1].decode()] += 1
    except TimeoutError:
        seen["none"] += number - seen.total()
    except (asyncio.IncompleteReadError, ConnectionError):
        seen["closed"] += number - seen.total()
    writer.transport.abort()
    return seen


def _slow(number: int, start: bytes, byte: bytes) -> Callable[[int], Awaitable[Counter[str]]]:
    """Return an attack by many clients that send `start`, and then `byte` (or nothing) each second."""

    async def run(port: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        connections = [await _connected(port, start) for _ in range(number)]
        ends = time.monotonic() + HOLD
        while time.monotonic() < ends and connections:
            turn = time.monotonic()
            for connection in list(connections):
                if (outcome := _outcome(connection, byte)) is not None:
                    seen[outcome] += 1
                    connections.remove(connection)
                    connection.close()
            await asyncio.sleep(max(0.0, BYTE_INTERVAL - (time.monotonic() - turn)))
        seen["open"] += len(connections)
        for connection in connections:
            connection.close()
        return +seen

    return run


async def _connected(port: int, start: bytes) -> socket.socket:
    """Return a connection that does not block, on which `start` was sent."""
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(TimeoutError, OSError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port)), 1)
        connection.send(start)
    return connection


def _outcome(connection: socket.socket, byte: bytes) -> str | None:
    """Return what became of a slow client's connection, after one more byte; None: it is open."""
    try:
        answer = connection.recv(4096)
        return answer.split(maxsplit=2)[1].decode() if answer else "closed"
    except BlockingIOError:
        pass
    except OSError:
        return "closed"
    with contextlib.suppress(OSError):
        connection.send(byte)
    return None


CONNECTION_ATTACKS = {
    "2 million one-byte chunks": ConnectionAttack(_one_byte_chunks),
    "30,000 pipelined requests": ConnectionAttack(_pipelined),
    "4,000 half-open connections": ConnectionAttack(_slow(4000, b"", b"")),
    "4,000 slow headers": ConnectionAttack(_slow(4000, b"GET /version HTTP/1.1\r\nX: ", b"a")),
    "4,000 slow bodies": ConnectionAttack(_slow(4000, HEAD + b"Content-Length: 1000\r\n\r\n{", b" ")),
    "256 descriptors, 1,000 slow headers": ConnectionAttack(
        _slow(1000, b"GET /version HTTP/1.1\r\nX: ", b"a"), max_descriptors=256
    ),
}


async def _run(attack: ConnectionAttack, port: int) -> Counter[str]:
    return await attack.run(port)


def main() -> None:
    """Run the attack that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("attack", choices=CONNECTION_ATTACKS)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    print("ready", flush=True)
    sys.stdin.readline()
    seen = asyncio.run(_run(CONNECTION_ATTACKS[options.attack], options.port))
    print(json.dumps({"seen": seen, "last_seconds": None}))


if __name__ == "__main__":
    main()
