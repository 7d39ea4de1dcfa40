"""Whether the server takes requests, and which ones are in the engine: what a graceful stop needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from quire.server.errors import UNAVAILABLE, ApiError


class Lifecycle:
    """Takes requests until `begin_drain`; knows the engine ids of those that run."""

    def __init__(self) -> None:
        self.draining = False
        self._live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_request_ids(self) -> list[str]:
        """Engine ids of the requests that run now."""
        return list(self._live)

    def begin_drain(self) -> None:
        """Refuse generation from now on; what runs goes on."""
        self.draining = True

    @contextlib.contextmanager
    def live(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Count `request_ids` as running for the duration of the context.

        Raises:
            ApiError: 503, while draining.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; it takes no new requests",
                kind=UNAVAILABLE,
                code="draining",
            )
        ids = set(request_ids) - self._live  # an id that runs already is the engine's to refuse
        self._live |= ids
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= ids
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        await self._idle.wait()
