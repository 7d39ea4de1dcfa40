"""X-Request-Start: the header with a request's arrival time at the router."""

from __future__ import annotations

import math
import re
import time

from quire.errors import InvalidRequestError

REQUEST_START = "X-Request-Start"

MAX_HELD = 600.0
"""Maximum age of a request in seconds; older start times are clamped to it."""

_TIME = re.compile(r"(?:t=)?([0-9]{1,20}(?:\.[0-9]{1,12})?)")
_UNITS = (1.0, 1e3, 1e6)  # per second; told apart by the magnitude of the current time


def request_start(epoch_time: float) -> str:
    """Return the header's value for a time in seconds since the epoch."""
    return f"t={epoch_time:.6f}"


def arrival_time_of(value: str) -> float:
    """Return a request's arrival in `time.monotonic()` seconds: between `MAX_HELD` ago and now.

    Args:
        value: the header's value: an optional "t=" and the time since the epoch in seconds, milliseconds or
            microseconds.

    Raises:
        InvalidRequestError: it is not a time.
    """
    match = _TIME.fullmatch(value.strip())
    if match is None:
        raise InvalidRequestError(
            f"{REQUEST_START} is {value!r:.64}; it must be a time since the epoch, such as "
            f"{request_start(1.7e9)}",
            param=REQUEST_START,
        )
    given, now = float(match[1]), time.time()
    unit = min(_UNITS, key=lambda unit: abs(math.log(max(given, 1.0) / unit / now)))
    age = now - given / unit
    return time.monotonic() - min(max(age, 0.0), MAX_HELD)
