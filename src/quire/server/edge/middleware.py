"""Middleware for every request: request id, API key, root path and metrics."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.tenancy.api_keys import key_refusal
from quire.server.tenancy.tenants import Tenant, Tenants
from quire.server.wire.access_log import CLIENT_LEFT, access_record_of, telling_status
from quire.server.wire.errors import OPENAI_ERRORS, ApiError, ErrorShape, error_shape_of
from quire.server.wire.paths import MONITORING_PATHS

MAX_REQUEST_ID_LENGTH = 128  # characters

_REQUEST_ID = re.compile(r"[!-~]+")  # visible ASCII


class RequestEnvelope:
    """ASGI middleware: gives each request an id, echoes it, and sets the shape of its errors.

    Args:
        app: the application inside.
        shapes: error shapes of APIs other than OpenAI's.
    """

    def __init__(self, app: ASGIApp, *, shapes: Sequence[ErrorShape] = ()) -> None:
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", uuid.uuid4().hex)
        refusal = _request_id_refusal(request_id)
        echoed = uuid.uuid4().hex if refusal else request_id
        path = scope["path"]
        shape = next((one for one in self._shapes if path.startswith(one.prefix)), OPENAI_ERRORS)
        scope.setdefault("state", {}).update(request_id=echoed, error_shape=shape)
        ids = dict.fromkeys(shape.id_headers, echoed)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ids)
            await send(message)

        if refusal:
            await refusal.response(shape)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


class KeyCheck:
    """ASGI middleware: refuses requests without a valid API key.

    `scope["state"]` gets the request's `Tenant` as `tenant`, if the path needs a key.

    Args:
        app: the application inside.
        tenants: the tenants with their keys.
        open_paths: paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, *, tenants: Tenants, open_paths: frozenset[str] = MONITORING_PATHS
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in self._open_paths or not self._tenants.needs_key:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = self._tenants.of_headers(headers)
        if tenant is None:
            given = [headers.get(name, "").encode("latin-1") for name in ("authorization", "x-api-key")]
            refusal = key_refusal(*given)
            await refusal.response(error_shape_of(scope))(scope, receive, send)
        else:
            scope.setdefault("state", {})["tenant"] = tenant
            if (record := access_record_of(scope)) is not None:
                record.tenant = tenant.name
            await self._app(scope, receive, _telling_rates(tenant, send) if tenant.usage.has_rates else send)


def _telling_rates(tenant: Tenant, send: Send) -> Send:
    """Wrap `send` to add the rest of the tenant's limits per minute to the answer's headers."""

    async def send_with_rates(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(tenant.usage.headers())
        await send(message)

    return send_with_rates


def _request_id_refusal(request_id: str) -> ApiError | None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        problem = f"has {len(request_id)} characters; at most {MAX_REQUEST_ID_LENGTH} are taken"
    elif not _REQUEST_ID.fullmatch(request_id):
        problem = f"is {request_id!r}; it must consist of visible ASCII characters"
    else:
        return None
    return ApiError(400, f"X-Request-Id {problem}", code="invalid_request_id")


class RootPath:
    """ASGI middleware: removes a prefix from request paths.

    Args:
        app: the application inside, which sees paths without the prefix.
        prefix: begins with a slash and does not end with one.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        await self._app(scope, receive, send)


OTHER = "other"
"""Label of unknown paths and methods, of which clients can make up any number."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_CONVERTOR = re.compile(r":\w+\}")


class HttpMetrics:
    """ASGI middleware: counts each request when it ends.

    Args:
        app: the application inside; all layers must pass on the scope itself, not a copy.
        requests: the counter, with the labels route, method and status.
        routes: the application's routes.
    """

    def __init__(self, app: ASGIApp, *, requests: Counter, routes: Sequence[Route]) -> None:
        self._app = app
        self._requests = requests
        self._routes = routes
        self._names = {route.endpoint: _CONVERTOR.sub("}", route.path) for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []
        try:
            await self._app(scope, receive, telling_status(send, statuses.append))
        except BaseException as error:
            statuses.append(CLIENT_LEFT if isinstance(error, asyncio.CancelledError) else 500)
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            self._requests.labels(self._route(scope), method, str(statuses[0] if statuses else 0)).inc()

    def _route(self, scope: Scope) -> str:
        """Return the documented path of the request's route, even if it was refused before routing."""
        if (endpoint := scope.get("endpoint")) is not None:
            return self._names[endpoint]
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return self._names[route.endpoint]
        return OTHER
