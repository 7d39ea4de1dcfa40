"""The router's HTTP: its routes, and how errors become answers."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from quire.cluster.access_logging import ERROR_REASON, REQUEST_ID, Handler, access_logging
from quire.cluster.cors import CORS
from quire.cluster.engines import DECODERS, EngineState
from quire.cluster.engines_endpoint import change_engine, list_engines, remove_engine
from quire.cluster.relay import STOPPING
from quire.cluster.router import Router
from quire.cluster.upstream import REQUEST_ID as REQUEST_ID_HEADER
from quire.server.access_log import AccessLog
from quire.server.api_keys import digests_of, key_digest, key_refusal, presented_keys
from quire.server.browsers import CallerRules
from quire.server.errors import TIMEOUT, ApiError, as_api_error
from quire.server.paths import MONITORING_PATHS
from quire.server.responses import Health

ENGINES_PATH = "/route/engines"
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")


def create_app(router: Router, log: AccessLog | None = None) -> web.Application:
    """Return the application that serves `router`, which must have been started.

    Args:
        router: to serve.
        log: where each request is logged; None: nowhere.
    """
    handlers = _Handlers(router)
    app = web.Application(
        middlewares=[*([] if log is None else [access_logging(log)]), handlers.envelope],
        client_max_size=router.config.max_body_bytes,
    )
    for path in GENERATION_PATHS:
        app.router.add_post(path, handlers.generate)
    if handlers.cors is not None:
        app.on_response_prepare.append(handlers.cors.add_headers)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get(ENGINES_PATH, handlers.list_engines)
    app.router.add_post(ENGINES_PATH, handlers.change_engine)
    app.router.add_delete(ENGINES_PATH, handlers.remove_engine)
    app.router.add_route("*", "/v1/{rest:.+}", handlers.pass_on)
    return app


class _Handlers:
    def __init__(self, router: Router) -> None:
        self._router = router
        config = router.config
        edge = config.edge
        self._rules = CallerRules(edge, config.host)
        self.cors = CORS(edge) if edge.cors_origins else None
        self._keys = digests_of(config.api_key)
        # Clients' keys are for the engines to check; who changes the engines must know theirs.
        self._management_keys = digests_of(config.engine_api_key) if config.pass_client_keys else self._keys

    @web.middleware
    async def envelope(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who calls, and turn everything that is raised into an answer in OpenAI's shape."""
        request[REQUEST_ID] = request.headers.get(REQUEST_ID_HEADER) or uuid4().hex
        try:
            response = await self._checked(request, handler)
        except asyncio.CancelledError:
            if not self._router.is_stopping:
                raise  # the client has left
            response = _response(STOPPING)
        except web.HTTPException as error:
            response = _response(_unrouted(request, error))
        except ConnectionResetError:
            raise  # the client has left
        except Exception as error:  # as_api_error logs what it does not know
            response = _response(as_api_error(error, request_id=request[REQUEST_ID]))
        self._router.metrics.answers.labels(str(response.status)).inc()
        return response

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_administration = request.path.startswith(ENGINES_PATH)
        refusal = self._rules.refusal(
            method=request.method,
            http_version=f"{request.version.major}.{request.version.minor}",
            hosts=request.headers.getall("Host", []),
            origin=request.headers.get("Origin", ""),
            content_type=request.headers.get("Content-Type", ""),
            is_administration=is_administration,
        )
        if refusal is not None:
            raise refusal
        if self.cors is not None and not is_administration:
            preflight = self.cors.preflight_answer(request)
            if preflight is not None:
                return preflight
        keys = self._management_keys if is_administration else self._keys
        if keys and request.path not in MONITORING_PATHS:
            given = [
                request.headers.get(name, "").encode("utf-8", "surrogateescape")
                for name in ("Authorization", "X-Api-Key")
            ]
            if keys.isdisjoint(map(key_digest, presented_keys(*given))):
                raise key_refusal(*given)
        return await handler(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Have a completion or a chat generated."""
        async with self._router.serving():
            return await self._router.generate(request, await self._body(request))

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Have an engine answer a request that generates nothing."""
        if request.path.startswith("/v1/requests"):
            raise ApiError(404, "ask an engine itself for its requests", code="route_not_found")
        async with self._router.serving():
            return await self._router.pass_on(request, await self._body(request))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Tell whether requests can be served: 200, or 503 with the reason."""
        if self._router.calls.draining:
            return _json(Health(status="draining", reason="the router is shutting down"), 503)
        if any(engine.state is EngineState.UP for engine in self._router.engines.of(DECODERS)):
            return _json(Health(status="ok"))
        return _json(Health(status="unavailable", reason="no engine that generates is up"), 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Return the metrics in the Prometheus text format."""
        return web.Response(
            body=self._router.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def list_engines(self, request: web.Request) -> web.StreamResponse:
        """List the engines."""
        return list_engines(self._router)

    async def change_engine(self, request: web.Request) -> web.StreamResponse:
        """Add an engine, or change whether it drains."""
        return await change_engine(self._router, await self._body(request))

    async def remove_engine(self, request: web.Request) -> web.StreamResponse:
        """Remove the engine that the query names."""
        return await remove_engine(self._router, request.query.get("url", ""))

    async def _body(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ApiError(415, f"Content-Encoding is {encoding!r}; bodies must be sent uncompressed")
        config = self._router.config
        try:
            async with asyncio.timeout(config.idle_timeout):
                return await request.read()
        except TimeoutError:
            raise ApiError(
                408, f"the request's body did not come within {config.idle_timeout:g} s", kind=TIMEOUT
            ) from None
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(
                413,
                f"the body is larger than {config.max_body_bytes} bytes (the router's max_body_bytes)",
                code="body_too_large",
            ) from None


def _unrouted(request: web.Request, error: web.HTTPException) -> ApiError:
    """Return the error of a path that does not exist, or of a method that a path does not have."""
    if error.status == 404:
        return ApiError(404, f"there is no {request.path!r:.300}", code="route_not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not allowed on {request.path}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    return ApiError(error.status, error.reason)


def _response(error: ApiError) -> web.Response:
    response = web.Response(
        body=error.body(), status=error.status, headers=error.headers, content_type="application/json"
    )
    response[ERROR_REASON] = error.reason
    return response


def _json(payload: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), status=status, content_type="application/json")
