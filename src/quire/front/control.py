"""Control of a running engine: pause, sleep, and explanations of requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from quire.engine.messages import Explain, Reply, ResetPrefixCache, ToEngine
from quire.errors import InvalidRequestError
from quire.front.live_requests import LiveRequests
from quire.front.loop_driver import LoopDriver
from quire.front.process.supervision import EngineSupervisor
from quire.scheduling.interface import PauseState

PauseMode = Literal["abort", "wait", "keep"]
"""Live requests are aborted, finish first, or continue afterwards where they were."""


class Pausing:
    """Pauses and resumes an engine, and puts it to sleep and wakes it.

    Args:
        engine: the engine process.
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
        """Hold new requests, wait until nothing runs, and return whether the prefix cache was cleared."""
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
        """Let requests start and continue again."""
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
        """Start the engine again, and return when it is ready; live requests continue."""
        async with self._turn:
            if not self.is_asleep:
                return
            self._requests.is_asleep = False
            self._engine.resume()
            await self._settle(lambda: self._requests.is_ready)

    async def _end_requests(self, mode: Literal["abort", "wait"]) -> None:
        """Wait until the requests that were sent to an engine have ended."""
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
        """Wait for a condition; if the engine ends for good instead, raise the reason."""
        await self._driver.wait_for(lambda: condition() or self._requests.failure is not None)
        self._requests.raise_failure()


class Explaining:
    """Explains what requests are doing or waiting for.

    Args:
        requests: the engine's live requests.
        call: sends the engine a call, and returns its reply.
    """

    def __init__(
        self, requests: LiveRequests, call: Callable[[Callable[[int], ToEngine]], Awaitable[Reply]]
    ) -> None:
        self._requests = requests
        self._call = call

    async def explain(self, groups: Sequence[Sequence[str]], limit: int | None) -> list[list[str]]:
        """Return the sentences of each group of requests, see `AsyncLLM.explain_all`."""
        wanted = (one for group in groups for one in self._sequence_ids(group)[:limit])
        asked = list(dict.fromkeys(wanted))
        texts: dict[str, str] = {}
        while rest := asked[len(texts) :]:
            reply = await self._call(functools.partial(Explain, sequence_ids=rest))
            texts.update(zip(rest, reply.texts, strict=False))
        return [self._sentences(group, texts, limit) for group in groups]

    def _sequence_ids(self, group: Sequence[str]) -> list[str]:
        return [one for request_id in group for one in self._requests.queued_sequence_ids(request_id)]

    def _sentences(self, group: Sequence[str], texts: Mapping[str, str], limit: int | None) -> list[str]:
        states = [state for request_id in group for state in self._states(request_id, texts)]
        sentences = [state for state in states if state is not None][:limit]
        num_left_out = len(states) - len(sentences)
        return sentences + [f"left out: {num_left_out} other completions"] * bool(num_left_out)

    def _states(self, request_id: str, texts: Mapping[str, str]) -> Sequence[str | None]:
        """Return what each unfinished completion is doing; None for one that was not asked about."""
        if sequence_ids := self._requests.queued_sequence_ids(request_id):
            return [texts.get(sequence_id) for sequence_id in sequence_ids]
        return self._requests.reasons_to_wait(request_id)
