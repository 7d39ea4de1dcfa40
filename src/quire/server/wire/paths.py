"""Paths: which ones machines ask for, and how clients spell them (a slash at the end, or no /v1)."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

READINESS_PATHS = ("/health", "/ready", "/ping")
"""They all tell whether requests can be served; which of them is asked depends on the platform."""

MONITORING_PATHS = frozenset({*READINESS_PATHS, "/live", "/metrics"})
"""Asked for all the time, by machines that have no key."""

POLLED_PATHS = MONITORING_PATHS | {"/stats", "/v1/requests"}
"""Asked for again and again, also by the page that people look at: the access log has what fails."""

_WITHOUT_VERSION = re.compile(r"/(chat/completions|completions|models)(/|\Z)")


class CanonicalPath:
    """ASGI middleware: gives other spellings of a path to the application as that path.

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
    """Return a path without a slash at its end, and below /v1 if it is one of OpenAI's."""
    if len(path) > 1:
        path = path.removesuffix("/")
    return f"/v1{path}" if _WITHOUT_VERSION.match(path) else path
