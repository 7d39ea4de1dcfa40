"""The calls being served, and whether new ones are accepted, for a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

from quire.server.wire.errors import UNAVAILABLE, ApiError


class LiveCalls:
    """The calls being served, with their requests in the engine; none is added after `begin_drain`."""

    def __init__(self) -> None:
        self.draining = False
        self._live: dict[str, tuple[str, ...]] = {}  # engine ids by `Tenant.engine_id`, in order of arrival
        self._aborted: set[str] = set()  # of those, by `Tenant.engine_id`
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def by_id(self) -> Mapping[str, tuple[str, ...]]:
        """Engine ids of each call being served, by its id (`Tenant.engine_id`); the oldest first."""
        return self._live

    @property
    def request_ids(self) -> list[str]:
        """Engine ids of all requests being served."""
        return list(itertools.chain.from_iterable(self._live.values()))

    def note_abort(self, call_id: str) -> None:
        """Note that a client has asked to abort a call."""
        self._aborted.add(call_id)

    def was_aborted(self, call_id: str) -> bool:
        """Whether a client has asked to abort a call."""
        return call_id in self._aborted

    def begin_drain(self) -> None:
        """Refuse new calls from now on; live ones continue."""
        self.draining = True

    @contextlib.contextmanager
    def serving(self, call_id: str, request_ids: Iterable[str]) -> Iterator[None]:
        """Count a call, with its requests in the engine, as being served for the duration of the context.

        Raises:
            ApiError: 503: the server is draining.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down and accepts no new requests",
                kind=UNAVAILABLE,
                code="draining",
            )
        is_new = call_id not in self._live  # the engine refuses duplicate ids
        if is_new:
            self._live[call_id] = tuple(request_ids)
        self._idle.clear()
        try:
            yield
        finally:
            if is_new:
                del self._live[call_id]
                self._aborted.discard(call_id)
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is being served."""
        await self._idle.wait()
