"""What happens to a request: which engines get it, and where it goes when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Collection
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from quire.cluster.engines import DECODERS, PREFILLERS, Engine, Engines, EngineState, Role
from quire.cluster.health import HealthChecks
from quire.cluster.metrics import Purpose, RouterMetrics
from quire.cluster.prefix_memory import PrefixMemory
from quire.cluster.prompts import GenerationBody, OtherBody, Prompt
from quire.cluster.relay import relay
from quire.cluster.upstream import Answer, EngineRequest, EngineRequestError, Headers, Upstream, end_to_end
from quire.config import RouterConfig
from quire.errors import InvalidRequestError
from quire.server.errors import SERVER_ERROR, TIMEOUT, UNAVAILABLE, ApiError
from quire.server.live_calls import LiveCalls

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Engines that a request is sent to at most, one after the other; for the prefill alone, one less."""

_BUSY = (429, 503)  # another engine may have room
_CLIENTS_FAULT = range(400, 500)
_REQUEST_ID = "X-Request-Id"
_ID_LENGTH = 120  # characters, so that an engine's limit of 128 leaves room for what is appended


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


class Router:
    """Sends requests to engines and their answers to clients; belongs to one event loop.

    Args:
        config: of the router.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.engines = Engines(PrefixMemory(config.max_remembered_chunks))
        self.metrics = RouterMetrics(self.engines.by_url.values())
        self.calls = LiveCalls()
        self.is_stopping = False
        self._upstream = Upstream(config)
        self._health = HealthChecks(self._upstream, config.health_interval)
        self._serving: set[asyncio.Task[Any]] = set()

    @property
    def num_serving(self) -> int:
        """Number of requests being served."""
        return len(self._serving)

    async def start(self) -> None:
        """Check all configured engines once, and go on checking them."""
        roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "engine": Role.BOTH}
        engines = [
            Engine(url.rstrip("/"), role)
            for name, role in roles.items()
            for url in getattr(self.config, name)
        ]
        await asyncio.gather(*(self._health.check(engine) for engine in engines))
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> None:
        """Send requests to an engine from now on, when it is up."""
        self.engines.by_url[engine.url] = engine
        self._health.watch(engine)

    async def remove(self, engine: Engine) -> None:
        """Send an engine no more requests; those that it has go on."""
        del self.engines.by_url[engine.url]
        self.metrics.forget(engine)
        await self._health.unwatch(engine)

    async def check(self, engine: Engine) -> None:
        """Check an engine's health now."""
        await self._health.check(engine)

    def stop_serving(self) -> None:
        """End all requests that are being served: with an error, as far as that can be told."""
        self.is_stopping = True
        for task in self._serving:
            task.cancel()

    async def close(self) -> None:
        """Close all connections to engines."""
        await self._health.close()
        await self._upstream.close()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Count a client's request for the duration of the context.

        Raises:
            ApiError: 429, too many are being served; 503 while draining.
        """
        limit = self.config.max_in_flight
        if len(self._serving) >= limit:
            raise ApiError(
                429,
                f"{len(self._serving)} requests are being served; the limit is {limit} (the router's "
                "max_in_flight); try again later",
                kind="rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        task = asyncio.current_task()
        assert task is not None
        with self.calls.serving(uuid4().hex, ()):
            self._serving.add(task)
            self.metrics.in_flight.inc()
            try:
                yield
            finally:
                self.metrics.in_flight.dec()
                self._serving.discard(task)

    async def generate(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer a request for a completion or a chat.

        Raises:
            InvalidRequestError: the body is not a JSON object.
            ApiError: no engine answered.
        """
        generation = GenerationBody(body)
        headers = self._headers(request)
        params = None
        if self._is_worth_a_prefill(generation):
            params = await self._prefill(request.path, headers, generation)
        return await self._answer(request, headers, generation, params)

    async def pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer any other request by an engine that generates.

        Raises:
            ApiError: no engine answered.
        """
        return await self._answer(request, self._headers(request), OtherBody(body))

    def _headers(self, request: web.Request) -> Headers:
        """Return the headers of the requests to engines: the client's own, but for its host and its key.

        Raises:
            InvalidRequestError: one is not UTF-8.
        """
        headers = end_to_end(request.headers)
        for name, value in headers.items():
            if not _is_utf8(value):
                raise InvalidRequestError(f"the header {name} is not UTF-8", param=str(name))
        headers.popall("Host", None)
        if self.config.engine_api_key:
            headers["Authorization"] = f"Bearer {self.config.engine_api_key}"
        elif self.config.api_key:
            headers.popall("Authorization", None)
        headers.setdefault(_REQUEST_ID, uuid4().hex)
        return headers

    def _is_worth_a_prefill(self, generation: GenerationBody) -> bool:
        if not self.engines.of(PREFILLERS) or not generation.can_be_split:
            return False
        prompt = generation.prompt
        decoder = self.engines.choose(DECODERS, prompt)
        if decoder is None:
            return False
        if self.engines.num_new_bytes(prompt, decoder) >= self.config.min_prefill_bytes:
            return True
        self.metrics.direct.inc()
        return False

    async def _prefill(self, path: str, headers: Headers, generation: GenerationBody) -> msgspec.Raw | None:
        """Have a prompt computed; return where its KV is, or None if no prefill engine has it."""
        headers = headers.copy()
        headers[_REQUEST_ID] = headers[_REQUEST_ID][:_ID_LENGTH] + "-prefill"
        asked = EngineRequest(
            method="POST",
            path=path,
            headers=headers,
            body=generation.for_prefill({"do_remote_decode": True}),
            timeout=self.config.prefill_timeout,
        )
        tried: list[Engine] = []
        while len(tried) < MAX_ATTEMPTS - 1:
            engine = self.engines.choose(PREFILLERS, generation.prompt, excluded=tried)
            if engine is None:
                break
            tried.append(engine)
            try:
                async with self._answer_of(engine, Purpose.PREFILL, generation.prompt, asked) as answer:
                    if answer.status == 200:
                        return self._params_in(engine, answer)
                    logger.warning("%s refused a prefill with status %d", engine.url, answer.status)
                    if answer.status in _CLIENTS_FAULT and answer.status not in _BUSY:
                        return None  # the engine that answers will tell the client
            except EngineRequestError as error:
                logger.warning("%s", error)
        self.metrics.fallbacks.inc()
        return None

    def _params_in(self, engine: Engine, answer: Answer) -> msgspec.Raw | None:
        try:
            params = msgspec.json.decode(answer.body, type=_PrefillAnswer).kv_transfer_params
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            params = msgspec.Raw(b"")
        if bytes(params).startswith(b"{"):
            return params
        logger.warning("%s returned no kv_transfer_params; does it have a KV connector?", engine.url)
        self.metrics.fallbacks.inc()
        return None

    async def _answer(
        self,
        request: web.Request,
        headers: Headers,
        body: GenerationBody | OtherBody,
        params: msgspec.Raw | None = None,
    ) -> web.StreamResponse:
        """Have a request answered by an engine that generates, or by another one if that fails.

        Args:
            request: of the client.
            headers: for the engines.
            body: what the client asks for.
            params: where the prompt's KV is.
        """
        prompt = body.prompt
        tried: list[Engine] = []
        failure: EngineRequestError | None = None
        while (engine := self._next_engine(prompt, tried)) is not None:
            if tried:
                self.metrics.retries.inc()
            tried.append(engine)
            asked = EngineRequest(
                method=request.method,
                path=request.raw_path,
                headers=headers,
                body=body.for_answer(params),
                timeout=self.config.first_byte_timeout,
            )
            try:
                async with self._answer_of(
                    engine, Purpose.ANSWER, prompt, asked, is_computed_elsewhere=params is not None
                ) as answer:
                    if answer.status not in _BUSY or self._next_engine(prompt, tried) is None:
                        return await self._relay(request, engine, answer)
            except EngineRequestError as error:
                logger.warning("%s", error)
                failure = error
                if error.was_reached:
                    params = None  # it may have taken the KV already
        raise self._no_answer(failure)

    def _next_engine(self, prompt: Prompt, tried: Collection[Engine]) -> Engine | None:
        if len(tried) >= MAX_ATTEMPTS:
            return None
        return self.engines.choose(DECODERS, prompt, excluded=tried)

    @contextlib.asynccontextmanager
    async def _answer_of(
        self,
        engine: Engine,
        purpose: Purpose,
        prompt: Prompt,
        asked: EngineRequest,
        *,
        is_computed_elsewhere: bool = False,
    ) -> AsyncIterator[Answer]:
        """Send a request to an engine, count it, and yield the answer; see `Upstream.answer`."""
        self.metrics.requests.labels(engine.url, purpose).inc()
        with self.engines.serving(engine, prompt, is_computed_elsewhere=is_computed_elsewhere) as served:
            try:
                async with self._upstream.answer(engine, asked) as answer:
                    served.answered()
                    yield answer
            except EngineRequestError as error:
                self.metrics.failures.labels(engine.url, purpose).inc()
                if not error.timed_out:
                    engine.doubt(str(error))
                raise

    async def _relay(self, request: web.Request, engine: Engine, answer: Answer) -> web.StreamResponse:
        def note_broken() -> None:
            self.metrics.broken.inc()
            engine.doubt("it broke off in the middle of an answer")

        return await relay(request, answer, on_broken=note_broken, is_stopping=lambda: self.is_stopping)

    def _no_answer(self, failure: EngineRequestError | None) -> ApiError:
        if failure is not None:
            if failure.timed_out:
                return ApiError(504, str(failure), kind=TIMEOUT, code="engine_timeout")
            return ApiError(502, str(failure), kind=SERVER_ERROR, code="engine_failed")
        engines = self.engines.of(DECODERS)
        states = "; ".join(f"{one.url} is {_state_of(one)}" for one in engines[:8])
        return ApiError(
            503,
            f"no engine can take the request: {states or 'there is none that generates'}",
            kind=UNAVAILABLE,
            code="no_engine",
            headers={"Retry-After": str(math.ceil(self.config.health_interval))},
        )


def _is_utf8(header: str) -> bool:
    try:
        header.encode()
    except UnicodeEncodeError:  # what aiohttp could not decode is there as lone surrogates
        return False
    return True


def _state_of(engine: Engine) -> str:
    return f"down ({engine.failure})" if engine.state is EngineState.DOWN else engine.state.value
