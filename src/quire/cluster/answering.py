"""Answering one request: engines are tried until one has answered to the end, also another's stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math

from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.calls import EngineCalls, PromptKV
from quire.cluster.engines.metrics import Purpose
from quire.cluster.engines.registry import DECODERS, Engine
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.cluster.models import tell_all_models
from quire.cluster.prefills import Prefill, PrefillFailedError, Prefills
from quire.cluster.prompts import GenerationBody, OtherBody, Prompt
from quire.cluster.relay import Relay
from quire.config import RouterConfig
from quire.server.wire.errors import SERVER_ERROR, TIMEOUT, UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Maximum number of engines that fail with one request, or with the rest of a stream after its last event.

One that could not be reached is not counted: the request cannot be why.
"""

RETRY_DELAY = 0.1
"""Seconds between two looks for an engine that is up."""

_MAX_SHOWN = 300  # bytes of an answer
_BUSY = (429, 503)  # another engine may have room


class Answering:
    """Answers one request.

    Args:
        request: the client's request.
        calls: sends requests to engines.
        config: configuration of the router.
    """

    def __init__(self, request: ClientRequest, calls: EngineCalls, config: RouterConfig) -> None:
        self._relay = Relay(request)
        self._request = request
        self._calls = calls
        self._config = config
        self._tried: list[Engine] = []
        self._num_failures = 0  # since the last event
        self._failure: EngineRequestError | None = None
        self._deadline = math.inf  # for another engine, on the event loop's clock

    async def wait_for_engine(self, prompt: Prompt) -> None:
        """Wait until an engine can take a prompt.

        Raises:
            ApiError: none is up, nor can be expected to be.
        """
        if await self._next_engine(prompt) is None:
            raise self._no_answer(prompt.model)

    async def _next_engine(self, prompt: Prompt) -> Engine | None:
        """Return the engine to try next, when one is up and not tried; None: none can be expected to be."""
        loop = asyncio.get_running_loop()
        if self._failure is None:
            self._deadline = loop.time() + self._config.recovery_timeout
        while (engine := self._choose(prompt)) is None:
            if not self._may_wait(prompt) or loop.time() + RETRY_DELAY > self._deadline:
                return None
            await asyncio.sleep(RETRY_DELAY)
            self._tried.clear()
        return engine

    async def answer(
        self, asked: EngineRequest, body: GenerationBody | OtherBody, prefills: Prefills | None = None
    ) -> None:
        """Have a decode engine answer, or another one if that fails.

        Args:
            asked: the request for engines, without its body.
            body: the client's body.
            prefills: compute the prompt on prefill engines; None: the answering engine does.

        Raises:
            ApiError: no engine answered.
        """
        prefill = None if prefills is None else await prefills.next()
        num_begun = 0  # attempts that an engine may take for live
        while (engine := await self._next_engine(body.prompt)) is not None:
            self._tried.append(engine)
            headers = asked.headers_for(f"again{num_begun}") if num_begun else asked.headers
            request = self._relay.asked(
                dataclasses.replace(asked, headers=headers),
                body.for_answer(None if prefill is None else prefill.params),
            )
            num_events = self._relay.num_events
            try:
                if await self._is_answered_by(engine, body.prompt, request, prefill):
                    return
            except PrefillFailedError:
                assert prefills is not None
                self._tried.remove(engine)
                prefill, num_begun = await prefills.next(), num_begun + 1
                continue
            except EngineRequestError as error:
                self._note(error, is_first=self._relay.num_events > num_events)
                if error.was_reached:  # the engine may have taken the KV, too
                    prefill, num_begun = None, num_begun + 1
                if self._relay.has_begun and not self._relay.is_continuable:
                    break
            if self._choose(body.prompt) is not None:
                self._calls.metrics.retries.inc()
        await self.fail(self._no_answer(body.prompt.model))

    async def answer_from(self, answer: Answer) -> None:
        """Forward an engine's answer that no other engine could give."""
        try:
            tell_all_models(answer, self._request, self._calls.engines)
            await self._relay.forward(answer)
        except EngineRequestError as error:
            self._note(error, is_first=True)
            await self.fail(self._no_answer(""))

    async def fail(self, failure: ApiError) -> None:
        """End the answer if it has begun; else raise the failure."""
        if not self._relay.has_begun:
            raise failure
        await self._relay.fail(failure)

    async def _is_answered_by(
        self, engine: Engine, prompt: Prompt, asked: EngineRequest, prefill: Prefill | None
    ) -> bool:
        """Return whether an engine has answered to the end, rather than that it is busy.

        Raises:
            EngineRequestError: the engine failed.
            PrefillFailedError: the prefill failed, so this engine would wait in vain.
        """
        async with contextlib.AsyncExitStack() as stack:
            answer = await self._begun_answer(stack, engine, prompt, asked, prefill)
            must_wait = self._failure is not None or self._choose(prompt) is not None
            if answer.status in _BUSY and must_wait:
                return False
            if not self._relay.can_forward(answer):
                said = answer.body[:_MAX_SHOWN].decode(errors="replace")
                raise EngineRequestError(engine, f"refused to continue a stream: {answer.status} {said}")
            if prefill is not None:
                prefill.is_taken = answer.status == 200
            if self._relay.has_begun:
                self._calls.metrics.continued.inc()
            tell_all_models(answer, self._request, self._calls.engines)
            await self._relay.forward(answer)
            return True

    async def _begun_answer(
        self,
        stack: contextlib.AsyncExitStack,
        engine: Engine,
        prompt: Prompt,
        asked: EngineRequest,
        prefill: Prefill | None,
    ) -> Answer:
        """Return an engine's answer once it has begun; the stack closes it."""
        kv = PromptKV.COMPUTED if prefill is None else PromptKV.LOADED
        call = self._calls.answer(engine, Purpose.ANSWER, prompt, kv, asked)
        if prefill is None:
            return await stack.enter_async_context(call)
        try:
            async with asyncio.timeout(None) as waiting:
                with prefill.ending(waiting):
                    return await stack.enter_async_context(call)
        except TimeoutError:
            raise PrefillFailedError from None

    def _choose(self, prompt: Prompt) -> Engine | None:
        if max(self._num_failures, len(self._tried)) >= MAX_ATTEMPTS:
            return None
        return self._calls.engines.choose(DECODERS, prompt, excluded=self._tried)

    def _may_wait(self, prompt: Prompt) -> bool:
        failure = self._failure
        if failure is None:
            is_post = self._request.scope["method"] == "POST"
            return is_post and self._calls.engines.is_one_expected(prompt.model)
        return self._num_failures < MAX_ATTEMPTS and not (failure.timed_out and failure.was_reached)

    def _note(self, error: EngineRequestError, *, is_first: bool) -> None:
        """Note an engine's failure, the first one since the last event or not."""
        logger.warning("%s", error)
        if self._relay.has_begun:
            self._calls.metrics.broken.inc()
            error.engine.doubt("it broke off in the middle of an answer")
        if is_first or self._failure is None:
            self._num_failures = 0
            self._tried = [error.engine]
            self._deadline = asyncio.get_running_loop().time() + self._config.recovery_timeout
        self._num_failures += error.was_reached
        self._failure = error

    def _no_answer(self, model: str) -> ApiError:
        if self._failure is not None:
            return error_of(self._failure, has_begun=self._relay.has_begun)
        engines = self._calls.engines.of(DECODERS, model)
        states = "; ".join(f"{one.url} is {one.described_state}" for one in engines[:8])
        return ApiError(
            503,
            f"no engine can take the request: {states or 'there is none that generates'}",
            kind=UNAVAILABLE,
            code="no_engine",
            headers={"Retry-After": str(math.ceil(self._config.health_interval))},
        )


def error_of(failure: EngineRequestError, *, has_begun: bool = False) -> ApiError:
    """Return the error of a request that no other engine can answer, or whose answer has begun."""
    if failure.timed_out and not has_begun:
        return ApiError(504, str(failure), kind=TIMEOUT, code="engine_timeout")
    return ApiError(502, str(failure), kind=SERVER_ERROR, code="engine_failed")
