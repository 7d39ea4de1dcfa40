"""Whether the server takes requests, and which ones are in the engine: what a graceful stop needs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

from quire.server.errors import UNAVAILABLE, ApiError


class Lifecycle:
    """Takes requests until `begin_drain`; knows the calls that run, and their requests in the engine."""

    def __init__(self) -> None:
        self.draining = False
        self._live: dict[str, tuple[str, ...]] = {}  # engine ids by the call's id, in order of arrival
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_request_ids(self) -> list[str]:
        """Engine ids of the requests that run now."""
        return list(itertools.chain.from_iterable(self._live.values()))

    @property
    def live_calls(self) -> Mapping[str, tuple[str, ...]]:
        """Engine ids of each call that runs now, by the id that its answer carries; the oldest first."""
        return self._live

    def begin_drain(self) -> None:
        """Refuse generation from now on; what runs goes on."""
        self.draining = True

    @contextlib.contextmanager
    def live(self, call_id: str, request_ids: Iterable[str]) -> Iterator[None]:
        """Count a call, with its requests in the engine, as running for the duration of the context.

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
        is_new = call_id not in self._live  # an id that runs already is the engine's to refuse
        if is_new:
            self._live[call_id] = tuple(request_ids)
        self._idle.clear()
        try:
            yield
        finally:
            if is_new:
                del self._live[call_id]
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        await self._idle.wait()
