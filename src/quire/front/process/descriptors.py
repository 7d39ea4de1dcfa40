"""Waiting for descriptors of any number; `select` takes none above 1023, and a server has thousands."""

from __future__ import annotations

import select


def is_readable(descriptor: int, timeout: float) -> bool:
    """Return whether there is something to read, or its end, within `timeout` seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
