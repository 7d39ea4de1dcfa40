"""An engine that pauses, and one that sleeps: it is ended, and started again when it is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from quire.engine.messages import Reply, ResetPrefixCache
from quire.errors import InvalidRequestError
from quire.front.live_requests import LiveRequests
from quire.front.loop_driver import LoopDriver
from quire.front.process.supervision import EngineSupervisor
from quire.scheduling.interface import PauseState

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of live requests: they are aborted, or finish first, or go on afterwards where they were."""


class Pausing:
    """Pauses and resumes an engine, and ends and starts it.

    Args:
        engine: a process.
        requests: the engine's live requests.
        driver: processes the engine's messages.
    """

    def __init__(self, engine: EngineSupervisor, requests: LiveRequests, driver: LoopDriver) -> None:
        self._engine = engine
        self._requests = requests
        self._driver = driver
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait because of `pause`."""
        return self._requests.held.is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has been ended by `sleep`."""
        return self._engine.is_suspended

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> bool:
        """Let new requests wait, and return when nothing runs: whether the prefix cache was cleared."""
        async with self._turn:
            self._requests.held.is_paused = True
            if mode == "keep":
                await self._set_pause_state(PauseState.PAUSED_ALL)
                return False
            await self._end_requests(mode)
            return (
                clears_cache and self._requests.is_ready and (await self._driver.call(ResetPrefixCache)).done
            )

    async def resume(self) -> None:
        """Let requests begin and go on again."""
        async with self._turn:
            await self._set_pause_state(PauseState.UNPAUSED)
            self._requests.held.is_paused = False
            self._requests.send_held()

    async def sleep(self, mode: PauseMode) -> None:
        """Refuse new requests, end the engine, and return when it has ended."""
        async with self._turn:
            if self.is_asleep:
                return
            self._requests.is_asleep = True
            try:
                if mode != "keep":
                    await self._end_requests(mode)
            except BaseException:  # the caller may have given up
                self._requests.is_asleep = False
                raise
            self._engine.suspend()
            await self._settle(lambda: self.is_asleep)

    async def wake(self) -> None:
        """Start the engine again, and return when it is ready; live requests go on."""
        async with self._turn:
            if not self.is_asleep:
                return
            self._requests.is_asleep = False
            self._engine.resume()
            await self._settle(lambda: self._requests.is_ready)

    async def _end_requests(self, mode: Literal["abort", "wait"]) -> None:
        """Return when the requests that an engine has had have ended."""
        requests = self._requests
        if mode == "abort":
            requests.abort(None)
        elif requests.pause_state is not PauseState.UNPAUSED:
            raise InvalidRequestError(
                "the engine is paused and keeps its requests, which cannot finish; resume it first, or use "
                "mode 'abort' or 'keep'",
                param="mode",
            )
        await self._settle(lambda: not requests.has_accepted)

    async def _set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state is self._requests.pause_state:
            return
        replies: list[Reply] = []
        self._requests.set_pause_state(pause_state, replies.append)
        await self._settle(lambda: bool(replies))

    async def _settle(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raise the reason if the engine ends for good instead."""
        await self._driver.wait_for(lambda: condition() or self._requests.failure is not None)
        self._requests.raise_failure()
