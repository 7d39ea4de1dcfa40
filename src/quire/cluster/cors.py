"""CORS of the router: Starlette's decisions, as aiohttp wants them."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

from quire.config import EdgeConfig
from quire.server.browsers import cors_options

_PRIVATE_NETWORK = "Access-Control-Request-Private-Network"


class CORS:
    """Which web pages a browser lets read the router's answers.

    Args:
        edge: of the router; with `cors_origins`.
    """

    def __init__(self, edge: EdgeConfig) -> None:
        self._rules = CORSMiddleware(_no_application, **cors_options(edge))

    def preflight_answer(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks before it sends a request; None to any other request."""
        if request.method != "OPTIONS" or "Origin" not in request.headers:
            return None
        if "Access-Control-Request-Method" not in request.headers:
            return None
        answer = self._rules.preflight_response(_starlette(request.headers))
        return web.Response(body=answer.body, status=answer.status_code, headers=dict(answer.headers))

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add what a browser needs to let a page read an answer; takes the place of what an engine said."""
        start: Message = {"type": "http.response.start", "headers": []}
        await self._rules.send(start, _discard, _starlette(request.headers))
        for name, value in start["headers"]:
            response.headers[name.decode("latin-1")] = value.decode("latin-1")


def _starlette(headers: Mapping[str, str]) -> Headers:
    names = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers", _PRIVATE_NETWORK)
    return Headers({name: _latin1(headers[name]) for name in names if name in headers})


def _latin1(value: str) -> str:
    return value.encode("utf-8", "replace").decode("latin-1")


async def _no_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only the rules of the middleware are used")


async def _discard(message: Message) -> None:
    pass
