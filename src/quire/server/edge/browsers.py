"""Access from web pages: refused, except for the server's own pages and configured origins.

A web page can have its visitor's browser send requests to servers that only the visitor's machine reaches. To
another site, the browser sends what a form could send and hides the answer from the page; for anything else
it asks the server first (CORS preflight). This module closes the remaining holes: pages whose host name
changes its address to the server's (DNS rebinding), and form-like requests with side effects.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config import EdgeConfig, host_name
from quire.server.http.listening import is_loopback
from quire.server.wire.errors import ApiError, error_shape_of

_CORS_MAX_AGE = 600  # seconds
_MAX_SPELLINGS = 64
_ALL_ADDRESSES = frozenset({"", "0.0.0.0", "::"})
_HARMLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class CallerRules:
    """The host names that a server accepts, and the web pages that may call it.

    Args:
        edge: the server's edge configuration.
        host: the host that it listens on, unless it listens on a Unix socket.

    Raises:
        ConfigError: there is no such host.
    """

    def __init__(self, edge: EdgeConfig, host: str) -> None:
        names = [host_name(one) for one in edge.allowed_hosts]
        takes_any = "*" in names or not (names or is_loopback(host))
        self._checks_names = not edge.uds and not takes_any
        self._names = frozenset([*names, "localhost"]) | ({host.lower()} - _ALL_ADDRESSES)
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*."))
        self._spellings: set[str] = set()  # Host headers known to name this server
        self._origins = frozenset(edge.cors_origins)

    def refusal(
        self,
        *,
        method: str,
        http_version: str,
        hosts: Sequence[str],
        origin: str = "",
        content_type: str = "",
    ) -> ApiError | None:
        """Return why a request is refused; None if it is allowed.

        Args:
            method: HTTP method.
            http_version: HTTP version, such as "1.1".
            hosts: values of its Host headers.
            origin: its Origin header; empty: there is none.
            content_type: its Content-Type header; empty: there is none.
        """
        if len(hosts) > 1 or (not hosts and http_version == "1.1"):
            return _bad_host_refusal(len(hosts))
        host = hosts[0] if hosts else ""
        if hosts and self._checks_names and not self._is_own(host):
            return ApiError(
                421,
                f"the Host header is {host!r:.200}, which is not a name of this server; use localhost, or "
                "add the name to the server's allowed_hosts",
                code="host_not_allowed",
            )
        if origin and method not in _HARMLESS_METHODS and not _asks_first(content_type):
            return self._unasked_refusal(origin, host)
        return None

    def _unasked_refusal(self, origin: str, host: str) -> ApiError | None:
        """Return why a request that skips CORS preflight is refused; None if it is allowed."""
        if _host_of(origin) == host.lower() or "*" in self._origins or origin in self._origins:
            return None
        return ApiError(
            403,
            f"a page of {origin!r:.200} sent this, and may not; add the origin to the server's "
            "cors_origins, and send application/json",
            code="cross_site_request",
        )

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this server."""
        if host in self._spellings:
            return True
        name = host_name(host)
        if not (name in self._names or name.endswith(self._suffixes) or _is_loopback_address(name)):
            return False
        if len(self._spellings) < _MAX_SPELLINGS:
            self._spellings.add(host)
        return True


class CallerCheck:
    """ASGI middleware: refuses requests by `CallerRules`.

    Args:
        app: the application inside.
        rules: the rules.
    """

    def __init__(self, app: ASGIApp, *, rules: CallerRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refusal = None if scope["type"] != "http" else self._refusal(scope)
        answer = refusal.response(error_shape_of(scope)) if refusal else self._app
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        hosts: list[str] = []
        origin = content_type = b""
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name == b"origin":
                origin = value
            elif name == b"content-type":
                content_type = value
        return self._rules.refusal(
            method=scope["method"],
            http_version=scope["http_version"],
            hosts=hosts,
            origin=origin.decode("latin-1"),
            content_type=content_type.decode("latin-1"),
        )


def cors_options(edge: EdgeConfig) -> Mapping[str, Any]:
    """Return the arguments of Starlette's CORSMiddleware."""
    return {
        "allow_origins": edge.cors_origins,
        "allow_methods": ("GET", "POST"),
        "allow_headers": ("*",),
        "allow_private_network": True,
        "expose_headers": ("X-Request-Id", "Retry-After", "X-Ignored-Parameters"),
        "max_age": _CORS_MAX_AGE,
    }


def _bad_host_refusal(num_hosts: int) -> ApiError:
    return ApiError(
        400,
        f"the request has {num_hosts} Host headers; send one",
        code="bad_host",
        headers={"Connection": "close"},
    )


def _asks_first(content_type: str) -> bool:
    """Whether browsers send a CORS preflight before a request of this type to another site."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_loopback_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
