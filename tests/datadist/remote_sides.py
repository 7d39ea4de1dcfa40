"""What tests do to an `LLMDataDist` in its own process, and ask of it; importable without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sides import num_transfers, pool_of, threads_of, transports_of

from quire.datadist.wire import sockets

Census = dict[str, int]


def census_of(side: Any) -> Census:
    """Count what a side and its process hold."""
    pool = pool_of(side)
    return {
        "bytes": pool.used_bytes,
        "caches": pool.num_caches,
        "keys": len(pool._bindings) + len(pool._blocks_caches),
        "transfers": num_transfers(pool),
        "links": len(transports_of(side)),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def growth(before: Census, now: Census) -> Census:
    """Return how much more there is of what has grown."""
    return {name: count - before[name] for name, count in now.items() if count > before[name]}


def notice_soon() -> None:
    """Let links that are made from now on notice within two seconds that their peer has vanished."""
    sockets.KEEPALIVE_IDLE = sockets.KEEPALIVE_INTERVAL = sockets.KEEPALIVE_PROBES = 1


def wait_for_links_to_end(prompt: Any, limit: float) -> bool:
    """Return whether all links of a PROMPT have ended, waiting for at most `limit` seconds for each."""
    threads = threads_of(prompt)
    for thread in threads:
        thread.join(limit)
    return not any(thread.is_alive() for thread in threads)
