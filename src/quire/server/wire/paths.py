"""Paths: those polled by machines, and clients' spellings (a trailing slash, or no /v1)."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

READINESS_PATHS = ("/health", "/ready", "/ping")
"""All report whether requests can be served; platforms differ in the path they use."""

MONITORING_PATHS = frozenset({*READINESS_PATHS, "/live", "/metrics"})
"""Polled by machines without a key."""

POLLED_PATHS = MONITORING_PATHS | {"/stats", "/v1/requests"}
"""Polled regularly, also by the page; the access log only has failures."""

_WITHOUT_VERSION = re.compile(r"/(chat/completions|completions|models)(/|\Z)")


class CanonicalPath:
    """ASGI middleware: replaces other spellings of a path by the canonical one.

    Args:
        app: the application inside, which sees one spelling of each path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and (path := canonical_path(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def canonical_path(path: str) -> str:
    """Return a path without a trailing slash, and below /v1 if it is one of OpenAI's."""
    if len(path) > 1:
        path = path.removesuffix("/")
    return f"/v1{path}" if _WITHOUT_VERSION.match(path) else path
