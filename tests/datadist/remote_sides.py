"""What tests do to an `LLMDataDist` in its own process, and ask of it; importable without pytest."""

from __future__ import annotations

from typing import Any

from quire.datadist import sockets


def notice_soon() -> None:
    """Let links that are made from now on notice within two seconds that their peer has vanished."""
    sockets.KEEPALIVE_IDLE = sockets.KEEPALIVE_INTERVAL = sockets.KEEPALIVE_PROBES = 1


def wait_for_links_to_end(prompt: Any, limit: float) -> bool:
    """Return whether all links of a PROMPT have ended, waiting for at most `limit` seconds for each."""
    threads = list(prompt._session.service._threads)
    for thread in threads:
        thread.join(limit)
    return not any(thread.is_alive() for thread in threads)
