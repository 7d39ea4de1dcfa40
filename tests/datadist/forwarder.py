"""A network between two peers that a test can stop or cut; it knows nothing of what they say."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

Direction = Literal["requests", "answers"]


class Forwarder:
    """Forwards connections to a port of this machine; `requests` flow there, `answers` come from there."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_forwarded: dict[Direction, int] = {"requests": 0, "answers": 0}
        self.limit_reached = threading.Event()
        self._changed = threading.Condition()
        self._is_held = False
        self._limits: dict[Direction, int] = {}
        self._cuts_at_limit = False
        self._num_until_flip: int | None = None
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hold(self) -> None:
        """Forward nothing more until `release`, and say nothing to either side."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        """Forward everything, also what was held."""
        with self._changed:
            self._is_held = False
            self._limits.clear()
            self.limit_reached.clear()
            self._changed.notify_all()

    def cut(self) -> None:
        """Close all connections; new ones are forwarded."""
        with self._changed:
            self._cut()

    def hold_after(self, num_bytes: int, direction: Direction = "answers") -> None:
        """Hold when more than so many bytes are to be forwarded from now on."""
        self._limit(num_bytes, direction, cuts=False)

    def cut_after(self, num_bytes: int, direction: Direction = "answers") -> None:
        """Cut when more than so many bytes are to be forwarded from now on."""
        self._limit(num_bytes, direction, cuts=True)

    def flip_bit_after(self, num_bytes: int) -> None:
        """Change one bit of what comes from there, so many bytes from now."""
        with self._changed:
            self._num_until_flip = num_bytes

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.release()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _limit(self, num_bytes: int, direction: Direction, *, cuts: bool) -> None:
        with self._changed:
            self._limits = {direction: num_bytes}
            self._cuts_at_limit = cuts

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener has been closed
            while True:
                near, _ = self._listener.accept()
                self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        far = socket.socket()
        # Little of what has been sent is on the way, so a limit is reached while the sender still sends.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        try:
            far.connect(self._target)
        except OSError:
            near.close()
            far.close()
            return
        with self._changed:
            self._connections.append((near, far))
            self._ends += near, far
        pumps = [(near, far, "requests"), (far, near, "answers")]
        threads = [threading.Thread(target=self._pump, args=pump) for pump in pumps]
        self._threads += threads
        for thread in threads:
            thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):  # one of the two has been closed
            while data := source.recv(1 << 16):
                while data:
                    allowed = self._wait_for_permission(source, len(data), direction)
                    target.sendall(self._flipped(data[:allowed], direction))
                    data = data[allowed:]
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held or not self._is_connected(source))
            self._close(source, target)

    def _wait_for_permission(self, source: socket.socket, num_bytes: int, direction: Direction) -> int:
        """Return how many bytes may be forwarded now; raises OSError if the connection has been cut."""
        with self._changed:
            while True:
                if not self._is_connected(source):
                    raise ConnectionError("the connection has been cut")
                if not self._is_held:
                    allowed = min(num_bytes, self._limits.get(direction, num_bytes))
                    if allowed:
                        self._count(allowed, direction)
                        return allowed
                    self._at_limit()
                    continue
                self._changed.wait()

    def _flipped(self, data: bytes, direction: Direction) -> bytes:
        with self._changed:
            if self._num_until_flip is None or direction == "requests":
                return data
            position, self._num_until_flip = self._num_until_flip, self._num_until_flip - len(data)
            if position >= len(data):
                return data
            self._num_until_flip = None
            return data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]

    def _is_connected(self, end: socket.socket) -> bool:
        return any(end in connection for connection in self._connections)

    def _count(self, num_bytes: int, direction: Direction) -> None:
        self.num_forwarded[direction] += num_bytes
        if direction in self._limits:
            self._limits[direction] -= num_bytes

    def _at_limit(self) -> None:
        if self._cuts_at_limit:
            self._limits.clear()
            self._cut()
        else:
            self._is_held = True
        self.limit_reached.set()

    def _cut(self) -> None:
        for near, far in list(self._connections):
            self._close(near, far)

    def _close(self, one: socket.socket, other: socket.socket) -> None:
        self._connections = [pair for pair in self._connections if one not in pair]
        for end in (one, other):
            with contextlib.suppress(OSError):  # the peer has closed it
                end.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()
