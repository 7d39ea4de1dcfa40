"""How many bytes of messages an engine may have sent that its front has not processed yet."""

from __future__ import annotations

WINDOW = 8 * 2**20
"""Bytes; a step's messages may exceed it, and no other step begins until the front has caught up."""

ACKNOWLEDGED_AT_ONCE = 2**20
"""Bytes that the front acknowledges with one message, so that most steps cost none."""

MESSAGE_OVERHEAD = 512
"""Bytes that a message takes besides its content, at most."""


class OutputWindow:
    """The engine's side: counts what was sent and what has been acknowledged."""

    def __init__(self) -> None:
        self.num_unprocessed = 0

    @property
    def has_room(self) -> bool:
        """Whether another step may begin."""
        return self.num_unprocessed < WINDOW

    def note_sent(self, data: bytes) -> None:
        """Count a message that has been sent."""
        self.num_unprocessed += size_of(data)

    def note_processed(self, num_bytes: int) -> None:
        """Count bytes that the front has acknowledged."""
        self.num_unprocessed -= num_bytes


class Acknowledgements:
    """The front's side: says when, and what, is to be acknowledged."""

    def __init__(self) -> None:
        self._num_received = 0

    def note_received(self, data: bytes) -> None:
        """Count a message that has been received."""
        self._num_received += size_of(data)

    def take_processed(self) -> int:
        """Return the bytes to acknowledge now that all that was received has been processed; 0: none."""
        if self._num_received < ACKNOWLEDGED_AT_ONCE:
            return 0
        num_bytes, self._num_received = self._num_received, 0
        return num_bytes


def size_of(data: bytes) -> int:
    """Return what a message counts."""
    return len(data) + MESSAGE_OVERHEAD
