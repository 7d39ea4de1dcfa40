"""The router's HTTP application: routes, and errors as answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.metrics import RouterMetrics
from quire.cluster.engines_endpoint import change_engine, list_engines, remove_engine
from quire.cluster.owners import FILES
from quire.cluster.relay import STOPPING
from quire.cluster.router import Router
from quire.config import EdgeConfig, RouterConfig
from quire.server.anthropic.answers import ANTHROPIC_ERRORS
from quire.server.edge.browsers import CallerCheck, CallerRules, cors_options
from quire.server.edge.middleware import KeyCheck, RequestEnvelope
from quire.server.ollama.answers import OLLAMA_ERRORS
from quire.server.tenancy.tenants import Tenants
from quire.server.wire.access_log import CLIENT_LEFT, AccessLog, AccessLogging, note_error, telling_status
from quire.server.wire.answers import Health, json_response
from quire.server.wire.bodies import bounded_body
from quire.server.wire.errors import ApiError, ClientGoneError, as_api_error
from quire.server.wire.paths import READINESS_PATHS, CanonicalPath
from quire.server.wire.streaming import unless_disconnected

ENGINES_PATH = "/route/engines"
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")

_Handler = Callable[[Request], Awaitable[Response]]


def create_app(router: Router, log: AccessLog | None = None, *, changes_engines: bool = True) -> ASGIApp:
    """Return the application that serves `router`, which must have been started.

    Args:
        router: the router to serve.
        log: access log; None: none.
        changes_engines: whether clients may add, drain and remove engines.
    """
    config = router.config
    endpoints = _Endpoints(router)
    generation = _Relayed(router, router.generate)
    others = _routed(
        *(Route(path, _answering(endpoints.health)) for path in READINESS_PATHS),
        Route("/live", _answering(endpoints.live)),
        Route("/metrics", _answering(endpoints.metrics)),
        Route(FILES, _Relayed(router, router.upload, is_streamed=True), methods=["POST"]),
        Route("/v1/{rest:path}", _Relayed(router, router.pass_on)),
    )

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's routing would cost a tenth of the router's time per request.
        is_generation = scope["path"] in GENERATION_PATHS and scope["method"] == "POST"
        await (generation if is_generation else others)(scope, receive, send)

    public = _guarded(by_path, config, config.edge, config.api_key)
    methods = ["GET", "POST", "DELETE"] if changes_engines else ["GET"]
    management = _guarded(
        _routed(Route(ENGINES_PATH, _answering(endpoints.manage_engines), methods=methods)),
        config,
        dataclasses.replace(config.edge, cors_origins=()),  # other sites' pages may not change engines
        # Engines may be the ones to check clients' keys; changing the engines takes the engines' key.
        config.engine_api_key if config.pass_client_keys else config.api_key,
    )

    async def by_purpose(scope: Scope, receive: Receive, send: Send) -> None:
        await (management if scope["path"].startswith(ENGINES_PATH) else public)(scope, receive, send)

    # Engines accept other spellings of a path, too, so all must be treated alike.
    app: ASGIApp = CanonicalPath(
        RequestEnvelope(_Counted(by_purpose, router.metrics), shapes=(ANTHROPIC_ERRORS, OLLAMA_ERRORS))
    )
    return app if log is None else AccessLogging(app, log=log)


def _routed(*routes: BaseRoute) -> ASGIApp:
    return Starlette(routes=routes, exception_handlers={HTTPException: _answer_unrouted})


def _guarded(app: ASGIApp, config: RouterConfig, edge: EdgeConfig, api_key: str) -> ASGIApp:
    """Return an application that refuses callers by the rules of `edge`, and those without the key."""
    app = KeyCheck(app, tenants=Tenants(api_key))
    if edge.cors_origins:
        app = CORSMiddleware(app, **cors_options(edge))
    return CallerCheck(app, rules=CallerRules(edge, config.host))


class _Counted:
    """ASGI middleware: counts the answers to clients; servers tell it in two ways that a client has left."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._answers = metrics.answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        statuses: list[int] = []
        try:
            await self._app(scope, receive, telling_status(send, statuses.append))
        except asyncio.CancelledError:
            statuses.append(CLIENT_LEFT)
            raise
        finally:
            if statuses:
                self._answers.labels(str(statuses[-1])).inc()


class _Relayed:
    """ASGI application: has engines answer a request, and turns exceptions into error answers.

    Args:
        router: sends requests to engines.
        answer: the router's method that answers a request.
        is_streamed: whether engines get the body as it arrives, rather than when it is complete.
    """

    def __init__(
        self,
        router: Router,
        answer: Callable[[ClientRequest], Awaitable[None]],
        *,
        is_streamed: bool = False,
    ) -> None:
        self._router = router
        self._answer = answer
        self._is_streamed = is_streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request: ClientRequest | None = None
        try:
            with self._router.serving():
                if self._is_streamed:
                    arriving = _ArrivingBody(receive)
                    request = ClientRequest(scope, send, b"", arriving.pieces())
                    receive = arriving.receive
                else:
                    body = await _body(Request(scope, receive), self._router)
                    request = ClientRequest(scope, send, body)
                await unless_disconnected(receive, self._unless_stopped(request))
            return
        except ClientGoneError:
            if request is not None and request.is_answered:
                return  # for ASGI, this is a disconnection, too
            note_error(scope, "client_left")
            response = Response(status_code=CLIENT_LEFT)
        except Exception as error:  # as_api_error logs what it does not know
            response = as_api_error(error, request_id=scope["state"]["request_id"]).response()
        await response(scope, receive, send)

    async def _unless_stopped(self, request: ClientRequest) -> None:
        """Answer a request; raise `STOPPING` if the router stops before the answer has begun."""
        try:
            with self._router.cancelled_by_stop():
                await self._answer(request)
        except asyncio.CancelledError:
            if not self._router.is_stopping:
                raise  # the client has left
            raise STOPPING from None


class _ArrivingBody:
    """A body that one task receives, while it waits for the client to leave, and another passes on.

    Args:
        receive: ASGI's receive.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._arrived: asyncio.Queue[Message] = asyncio.Queue(1)

    async def receive(self) -> Message:
        """Return ASGI's next message, once what came before it has been taken."""
        message = await self._receive()
        if message["type"] == "http.request":
            await self._arrived.put(message)
        return message

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body; it does not end if the client leaves first."""
        has_more = True
        while has_more:
            message = await self._arrived.get()
            has_more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece


class _Endpoints:
    """Endpoints of the router itself."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, request: Request) -> Response:
        """Answer 200 if requests can be served, otherwise 503 with the reason."""
        health = self._router.health()
        return json_response(health, 200 if health.status == "ok" else 503)

    async def live(self, request: Request) -> Response:
        """Answer 200: the router is alive, regardless of the engines."""
        return json_response(Health(status="ok"))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in the Prometheus text format."""
        return Response(self._router.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def manage_engines(self, request: Request) -> Response:
        """Add, change or remove an engine, as the method says, and list the engines."""
        match request.method:
            case "POST":
                await change_engine(self._router, await _body(request, self._router))
            case "DELETE":
                await remove_engine(self._router, request.query_params.get("url", ""))
        return json_response(list_engines(self._router))


def _answering(handler: _Handler) -> _Handler:
    """Wrap a handler: exceptions become error answers in OpenAI's shape."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            note_error(request.scope, "client_left")
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # as_api_error logs what it does not know
            return as_api_error(error, request_id=request.scope["state"]["request_id"]).response()

    return answer


async def _body(request: Request, router: Router) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r}; bodies must be sent uncompressed")
    return await bounded_body(request, router.config.max_body_bytes)


async def _answer_unrouted(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods with 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return ApiError(404, f"there is no {path!r:.300}", code="route_not_found").response()
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {path}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
    return as_api_error(error).response()
