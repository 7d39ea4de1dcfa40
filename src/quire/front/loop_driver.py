"""Driving an engine from an event loop: messages and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from quire.engine.messages import EngineInfo, Reply, ToEngine
from quire.errors import EngineDeadError
from quire.front.live_requests import LiveRequests
from quire.front.process.supervision import EngineSupervisor

logger = logging.getLogger(__name__)


class LoopDriver:
    """Processes an engine's messages on the event loop that runs when it is attached.

    Args:
        engine: the engine process.
        requests: the engine's live requests.
    """

    def __init__(self, engine: EngineSupervisor, requests: LiveRequests) -> None:
        self._engine = engine
        self._requests = requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0  # uvloop's handles do not always have `when`
        self._next_turn: asyncio.Handle | None = None  # for messages that are left
        self._changed = asyncio.Event()

    def attach(self) -> None:
        """Watch the engine process from the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._requests.failure is not None:
            return
        self._loop = loop
        self._changed = asyncio.Event()
        loop.add_reader(self._engine.event_fd, self.process)
        loop.call_soon(self.process)  # messages that arrived before

    def detach(self) -> None:
        """Stop watching the engine process; all tasks in `wait_for` check their conditions."""
        for handle in (self._timer, self._next_turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._next_turn = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._engine.event_fd)
        self._loop = None
        self._notify_waiters()

    def process(self) -> None:
        """Process arrived messages for one turn, and do what is due."""
        if self._loop is None:
            return
        is_more = False
        try:
            is_more = self._requests.receive_some() or self._engine.has_more
        except Exception as error:  # its contents are lost: some callers would wait forever
            logger.exception("a message from the engine could not be processed; the engine is shut down")
            self._requests.fail(EngineDeadError(f"a message from the engine was not processed: {error!r}"))
        if self._requests.failure is not None:
            self.detach()
            self._engine.close()
        elif is_more and self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._on_next_turn)
        self.set_timer()
        self._notify_waiters()

    async def wait_until_ready(self) -> EngineInfo:
        """Attach to the running loop, and wait until the engine has been ready for the first time.

        Raises:
            QuireError: the engine could not be built, or has ended.
        """
        self.attach()
        if not self._requests.has_started:
            await self.wait_for(lambda: self._requests.has_started or self._requests.failure is not None)
        return self._requests.info

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until a message has made `condition` true, or `timeout` seconds have passed."""
        self.set_timer()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._changed.wait()

    async def call(self, make: Callable[[int], ToEngine]) -> Reply:
        """Send the message that `make` returns for a call id, and return the reply.

        Raises:
            QuireError: the reply is an error, or the engine has ended, or another is being started.
        """
        await self.wait_until_ready()
        replies: list[Reply] = []
        self._requests.call(make, replies.append)
        await self.wait_for(lambda: bool(replies) or self._requests.failure is not None)
        self._requests.raise_failure()
        if (error := replies[0].error) is not None:
            raise error.to_exception()
        return replies[0]

    def set_timer(self) -> None:
        """Schedule `process` for when something is due, even if no message arrives before."""
        due = self._requests.next_due
        if self._loop is None or due is None:
            return
        if self._timer is None or due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._on_timer)  # its clock is the monotonic one, too

    def _on_next_turn(self) -> None:
        self._next_turn = None
        self.process()

    def _on_timer(self) -> None:
        self._timer = None
        self.process()

    def _notify_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
