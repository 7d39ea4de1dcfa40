"""An engine that pauses, and one that sleeps: it is ended, and started again when it is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from quire.engine.messages import GetStats, Reply, ResetPrefixCache, ToEngine
from quire.errors import InvalidRequestError
from quire.front.live_requests import LiveRequests
from quire.front.supervision import EngineSupervisor
from quire.scheduling.interface import PauseState

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of live requests: they are aborted, or finish first, or go on afterwards where they were."""


class Pausing:
    """Pauses and resumes an engine, and ends and starts it.

    Args:
        engine: a process.
        requests: the engine's live requests.
        call: sends the engine a call, and returns its reply.
        wait_for: returns when messages from the engine have made a condition true.
    """

    def __init__(
        self,
        engine: EngineSupervisor,
        requests: LiveRequests,
        call: Callable[[Callable[[int], ToEngine]], Awaitable[Reply]],
        wait_for: Callable[[Callable[[], bool]], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._call = call
        self._wait_for = wait_for
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether the engine admits no requests because of `pause`."""
        return self._requests.pause_state is not PauseState.UNPAUSED

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has been ended by `sleep`."""
        return self._engine.is_suspended

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> bool:
        """Let no new request begin, wait until none runs, and return whether the prefix cache was cleared."""
        async with self._turn:
            is_set = self._set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
            if mode == "abort":
                self._requests.abort(None)
            await self._wait_for(is_set)
            self._raise_failure()
            if mode == "keep" or not self._requests.is_ready:
                return False
            await self._call(GetStats)  # what was told before may be of the time before the pause
            await self._wait_for(self._nothing_runs)
            return clears_cache and (await self._call(ResetPrefixCache)).done

    async def resume(self) -> None:
        """Let requests begin and go on again."""
        async with self._turn:
            await self._wait_for(self._set_pause_state(PauseState.UNPAUSED))
            self._raise_failure()

    async def sleep(self, mode: PauseMode) -> None:
        """Refuse new requests, end the engine, and return when it has ended."""
        async with self._turn:
            if self.is_asleep:
                return
            if mode == "wait" and self.is_paused:
                raise InvalidRequestError(
                    "the engine is paused, so that requests which wait never finish; resume it first, or use "
                    "mode 'abort' or 'keep'",
                    param="mode",
                )
            self._requests.is_asleep = True
            try:
                if mode == "abort":
                    self._requests.abort(None)
                if mode != "keep":
                    await self._wait_for(lambda: not self._requests.outputs or self._has_failed())
                self._raise_failure()
            except BaseException:  # the caller may have given up
                self._requests.is_asleep = False
                raise
            self._engine.suspend()
            await self._wait_for(lambda: self.is_asleep or self._has_failed())
            self._raise_failure()

    async def wake(self) -> None:
        """Start the engine again, and return when it is ready; live requests go on."""
        async with self._turn:
            if not self.is_asleep:
                return
            self._requests.is_asleep = False
            self._engine.resume()
            await self._wait_for(lambda: self._requests.is_ready or self._has_failed())
            self._raise_failure()

    def _set_pause_state(self, pause_state: PauseState) -> Callable[[], bool]:
        """Tell the engine, and return whether it has answered, as a condition."""
        replies: list[Reply] = []
        self._requests.set_pause_state(pause_state, replies.append)
        return lambda: bool(replies) or self._has_failed()

    def _nothing_runs(self) -> bool:
        requests = self._requests
        stats = requests.latest_stats
        return not requests.outputs or stats is None or not stats.num_running or not requests.is_ready

    def _has_failed(self) -> bool:
        return self._requests.failure is not None

    def _raise_failure(self) -> None:
        self._requests.raise_failure()
