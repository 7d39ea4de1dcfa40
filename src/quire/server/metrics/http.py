"""Counts requests over HTTP by route, method and status."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.wire.access_log import CLIENT_LEFT

OTHER = "other"
"""Label of paths that are no route, and of methods that HTTP does not define: clients can make up many."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_CONVERTOR = re.compile(r":\w+\}")


class HttpMetrics:
    """ASGI middleware: counts each request when it ends.

    Args:
        app: the application inside; it and whatever is between must pass the scope on, not a copy.
        requests: the counter, with the labels route, method and status.
        routes: of the application.
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
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except BaseException as error:
            status = status or (CLIENT_LEFT if isinstance(error, asyncio.CancelledError) else 500)
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            self._requests.labels(self._route(scope), method, str(status)).inc()

    def _route(self, scope: Scope) -> str:
        """Return the path of the request's route as it is documented, also if it was refused before."""
        if (endpoint := scope.get("endpoint")) is not None:
            return self._names[endpoint]
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return self._names[route.endpoint]
        return OTHER
