"""Routing of requests to engines, with retries on another engine after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Collection, Iterator
from typing import TYPE_CHECKING, Any

from quire.cluster import files, owners
from quire.cluster.answering import Answering
from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.calls import EngineCalls
from quire.cluster.engines.health import HealthChecks
from quire.cluster.engines.metrics import RouterMetrics
from quire.cluster.engines.registry import DECODERS, PREFILLERS, Engine, Engines, EngineState, Role
from quire.cluster.engines.upstream import EngineRequest, Upstream
from quire.cluster.models import model_of
from quire.cluster.prefills import Prefills
from quire.cluster.prefixes.memory import PrefixMemory
from quire.cluster.prompts import GenerationBody, OtherBody, Prompt
from quire.cluster.relay import STOPPING
from quire.config import RouterConfig
from quire.server.live_calls import LiveCalls
from quire.server.wire.answers import Health
from quire.server.wire.errors import ApiError

if TYPE_CHECKING:
    from quire.cluster.engines.kv_event_feeds import KVEventFeeds
    from quire.cluster.prefixes.finder import PrefixFinder

_OWN_AFFAIRS = {
    "/v1/requests": "ask an engine directly for its requests",
    "/v1/kv_transfers": "the router releases KV on engines itself",
}


class Router:
    """Sends requests to engines and their answers to clients, on one event loop.

    Args:
        config: configuration of the router.
        models: names of models that are served even while no known engine has them.
    """

    def __init__(self, config: RouterConfig, models: Collection[str] = ()) -> None:
        self.config = config
        self.engines = Engines(PrefixMemory(config.max_remembered_chunks), models)
        self.metrics = RouterMetrics(self.engines.by_url.values())
        self.calls = LiveCalls()
        self.is_stopping = False
        self._upstream = Upstream(config)
        self._calls = EngineCalls(self.engines, self._upstream, self.metrics)
        self._lookup = _prefix_finder(config)
        self._health = HealthChecks(self._upstream, config.health_interval, _feeds(config, self._lookup))
        self._answering: set[asyncio.Task[Any]] = set()
        self._call_ids = itertools.count()

    @property
    def num_serving(self) -> int:
        """Number of requests being served."""
        return len(self.calls.by_id)

    async def start(self) -> None:
        """Check all configured engines once, and keep checking them."""
        roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "engine": Role.BOTH}
        engines = [
            Engine(url.rstrip("/"), role)
            for name, role in roles.items()
            for url in getattr(self.config, name)
        ]
        await asyncio.gather(*map(self.add, engines))

    async def add(self, engine: Engine) -> None:
        """Add an engine, to be used when it is up; returns after its first health check."""
        self.engines.by_url[engine.url] = engine
        await self._health.watch(engine)

    async def remove(self, engine: Engine) -> None:
        """Stop sending requests to an engine; running ones continue."""
        del self.engines.by_url[engine.url]
        self.metrics.forget(engine)
        await self._health.unwatch(engine)

    def stop_serving(self) -> None:
        """End all requests being answered, with an error where the client can still get one."""
        self.is_stopping = True
        for task in self._answering:
            task.cancel()

    async def close(self) -> None:
        """Close all connections to engines."""
        await self._health.close()
        await self._calls.releases.close()
        await self._upstream.close()
        if self._lookup is not None:
            self._lookup.close()

    def health(self) -> Health:
        """Return whether requests can be served. Thread-safe."""
        if self.calls.draining:
            return Health(status="draining", reason="the router is shutting down")
        if any(engine.state is EngineState.UP for engine in self.engines.of(DECODERS)):
            return Health(status="ok")
        return Health(status="unavailable", reason="no engine that generates is up")

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a client's request for the duration of the context.

        Raises:
            ApiError: 429: too many requests are being served; 503: the router is draining.
        """
        limit = self.config.max_in_flight
        if self.num_serving >= limit:
            raise ApiError(
                429,
                f"{self.num_serving} requests are being served; the limit is {limit} (the router's "
                "max_in_flight); try again later",
                kind="rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        with self.calls.serving(str(next(self._call_ids)), ()), self.metrics.in_flight.track_inprogress():
            yield

    @contextlib.contextmanager
    def cancelled_by_stop(self) -> Iterator[None]:
        """Let `stop_serving` cancel the current task for the duration of the context."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            yield
        finally:
            self._answering.discard(task)

    async def generate(self, request: ClientRequest) -> None:
        """Answer a request for a completion or a chat.

        Raises:
            InvalidRequestError: the body is not a JSON object, or a header is not UTF-8.
            ApiError: no engine answered.
        """
        generation = GenerationBody(request.body)
        generation.prompt.model = self._known_model(generation.prompt.model)
        asked = self._asked(request)
        await self._look_up(request.path, request.body, generation.prompt)
        async with self._ended_by_stop(request) as answering:
            await answering.wait_for_engine(generation.prompt)
            if not self._is_worth_a_prefill(generation):
                await answering.answer(asked, generation)
                return
            prefills = Prefills(self._calls, self.config, asked, generation)
            try:
                await answering.answer(asked, generation, prefills)
            finally:
                await prefills.close()

    async def pass_on(self, request: ClientRequest) -> None:
        """Have a decode engine answer any other request; one with the model that the request names, if any.

        Raises:
            InvalidRequestError: a header is not UTF-8.
            ApiError: no engine answered, or the path is not available through the router.
        """
        for path, advice in _OWN_AFFAIRS.items():
            if request.path.startswith(path):
                raise ApiError(404, advice, code="route_not_found")
        asked = self._asked(request)
        model = self._known_model(model_of(request))
        async with self._ended_by_stop(request) as answering:
            if files.is_list(request):
                await files.answer_list(self._calls, asked, request, answering)
            elif owners.needs_owner(request):
                asked = dataclasses.replace(asked, body=request.body)
                named = owners.named_in(request)
                await owners.answer_by_owner(self._calls, asked, named, answering.answer_from, model)
            else:
                await answering.answer(asked, OtherBody(request.body, model))

    async def upload(self, request: ClientRequest) -> None:
        """Have a decode engine store a file, which is passed on as it arrives.

        Raises:
            InvalidRequestError: a header is not UTF-8.
            ApiError: no engine answered.
        """
        assert request.pieces is not None
        timeout = self.config.connections.body_timeout + self.config.first_byte_timeout
        asked = dataclasses.replace(self._asked(request), body=request.pieces, timeout=timeout)
        async with self._ended_by_stop(request) as answering:
            await files.upload(self._calls, asked, answering)

    @contextlib.asynccontextmanager
    async def _ended_by_stop(self, request: ClientRequest) -> AsyncIterator[Answering]:
        """Yield what answers a request; an answer that has begun ends with an error if the router stops."""
        answering = Answering(request, self._calls, self.config)
        try:
            yield answering
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            await answering.fail(STOPPING)

    def _asked(self, request: ClientRequest) -> EngineRequest:
        """Return the request for engines: the client's headers without host and key, and no body yet.

        Raises:
            InvalidRequestError: a header is not UTF-8.
        """
        headers = request.headers()
        headers.popall("Host", None)
        if self.config.engine_api_key and not self.config.pass_client_keys:
            headers["Authorization"] = f"Bearer {self.config.engine_api_key}"
            headers.popall("X-Api-Key", None)
        elif self.config.api_key:
            headers.popall("Authorization", None)
            headers.popall("X-Api-Key", None)
        return EngineRequest(
            method=request.scope["method"],
            path=request.target,
            headers=headers,
            body=b"",
            timeout=self.config.first_byte_timeout,
        )

    def _known_model(self, name: str) -> str:
        """Return a model's name; empty, so that any engine refuses it, if none serves it."""
        return name if name in self.engines.models or self.engines.of(DECODERS, name) else ""

    async def _look_up(self, path: str, body: bytes, prompt: Prompt) -> None:
        """Look up the cached part of a prompt on engines whose KV events are followed."""
        engines = self.engines.of(DECODERS | PREFILLERS, prompt.model)
        followed = [engine.blocks for engine in engines if engine.blocks is not None]
        if self._lookup is None or not followed:
            return
        prompt.cached = await self._lookup.find(path, body, len(prompt.content), followed)
        if prompt.cached is None:
            self.metrics.not_tokenized.inc()

    def _is_worth_a_prefill(self, generation: GenerationBody) -> bool:
        prompt = generation.prompt
        if not self.engines.of(PREFILLERS, prompt.model) or not generation.can_be_split:
            return False
        decoder = self.engines.choose(DECODERS, prompt)
        if decoder is None:
            return False
        if self.engines.num_new_bytes(prompt, decoder) >= self.config.min_prefill_bytes:
            return True
        self.metrics.direct.inc()
        return False


def _prefix_finder(config: RouterConfig) -> PrefixFinder | None:
    if not config.tokenizer:
        return None
    from quire.cluster.prefixes.finder import PrefixFinder
    from quire.models.checkpoints.hub import resolve_model
    from quire.models.checkpoints.tokenizers.reading import read_tokenizer

    tokenizers = (read_tokenizer(resolve_model(model, weights=False)) for model in config.tokenizer)
    return PrefixFinder(tokenizers, config.tokenize_timeout)


def _feeds(config: RouterConfig, lookup: PrefixFinder | None) -> KVEventFeeds | None:
    if lookup is None:
        return None
    from quire.cluster.engines.kv_event_feeds import KVEventFeeds

    return KVEventFeeds(config, lookup.tokenizers)
