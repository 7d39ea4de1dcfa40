"""How fast the queue drains, to tell refused clients when to retry."""

from __future__ import annotations

import math
from collections.abc import Callable

WINDOW = 10.0  # seconds after which an observation is weighted by 1 / e
SHORTEST_WAIT = 1.0  # seconds
LONGEST_WAIT = 60.0  # seconds


class DrainRate:
    """Requests and tokens that leave the queue per second, weighted towards the last `WINDOW` seconds.

    Only time in which something waited counts: an engine with nothing to do is not a slow one.

    Args:
        clock: seconds; read only when a method is called.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Something has waited since then; the time before it has been counted.
        self._busy_since: float | None = None
        self._seconds = 0.0
        self._num_requests = 0.0
        self._num_tokens = 0.0

    def note(self, num_tokens: int, num_requests: int, *, queue_is_empty: bool) -> None:
        """Count what has left the queue, and note whether anything is left in it."""
        if self._count_time():
            self._num_requests += num_requests
            self._num_tokens += num_tokens
        if queue_is_empty:
            self.pause()

    def pause(self) -> None:
        """Note that nothing is left in the queue: what comes next begins to wait when it comes."""
        self._busy_since = None

    def retry_after(self, excess_requests: int, excess_tokens: int) -> float:
        """Return the seconds until so many requests and tokens will have left the queue.

        From `SHORTEST_WAIT` to `LONGEST_WAIT`. As long as nothing has left yet, it is the time for which
        something has waited.
        """
        self._count_time()
        shares = 1.0  # of what has left in `_seconds`
        if self._num_requests:
            shares = max(excess_requests / self._num_requests, excess_tokens / max(self._num_tokens, 1.0))
        return min(max(self._seconds * shares, SHORTEST_WAIT), LONGEST_WAIT)

    def _count_time(self) -> bool:
        """Count the time since the last call, if something waited; return whether it did."""
        now, since = self._clock(), self._busy_since
        self._busy_since = now
        if since is None:
            return False
        weight = math.exp((since - now) / WINDOW)
        self._seconds = self._seconds * weight + (now - since)
        self._num_requests *= weight
        self._num_tokens *= weight
        return True
