"""The calls being served, and whether new ones are accepted, for a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

from quire.errors import DuplicateRequestError
from quire.server.wire.errors import UNAVAILABLE, ApiError


class LiveCalls:
    """The calls being served, with their requests in the engine; none is added after `begin_drain`.

    Args:
        ids_of_all: ids of the live calls of all models of the server, which this changes, too; None: there
            is one model.
    """

    def __init__(self, ids_of_all: set[str] | None = None) -> None:
        self.draining = False
        self._ids_of_all = set() if ids_of_all is None else ids_of_all
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
            DuplicateRequestError: a call of another model has this id.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down and accepts no new requests",
                kind=UNAVAILABLE,
                code="draining",
            )
        is_new = call_id not in self._live  # the engine refuses its own duplicate ids
        if is_new:
            if call_id in self._ids_of_all:
                raise DuplicateRequestError(
                    f"the request id {call_id!r} is in use by a live request for another model; "
                    "choose another",
                    param="request_id",
                )
            self._ids_of_all.add(call_id)
            self._live[call_id] = tuple(request_ids)
        self._idle.clear()
        try:
            yield
        finally:
            if is_new:
                del self._live[call_id]
                self._ids_of_all.discard(call_id)
                self._aborted.discard(call_id)
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is being served."""
        await self._idle.wait()
