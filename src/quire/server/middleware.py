"""What surrounds every request: its X-Request-Id, and who may send it."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError

MAX_REQUEST_ID_LENGTH = 128  # characters
OPEN_PATHS = frozenset({"/health", "/live", "/metrics"})

_REQUEST_ID = re.compile(r"[!-~]+")  # visible ASCII


class RequestEnvelope:
    """ASGI middleware: gives each request an id and echoes it.

    Args:
        app: the application inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", uuid.uuid4().hex)
        refusal = _request_id_refusal(request_id)
        echoed = uuid.uuid4().hex if refusal else request_id
        scope.setdefault("state", {})["request_id"] = echoed

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = echoed
            await send(message)

        if refusal:
            await refusal.response()(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


class KeyCheck:
    """ASGI middleware: refuses requests without an API key, except for `OPEN_PATHS`.

    Args:
        app: the application inside.
        api_key: that must come with a request; empty: none.
    """

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refusal = None
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            refusal = key_refusal(
                self._api_key,
                headers.get("authorization", "").encode("latin-1"),
                headers.get("x-api-key", "").encode("latin-1"),
            )
        await (refusal.response() if refusal else self._app)(scope, receive, send)


def key_refusal(api_key: bytes, authorization: bytes, x_api_key: bytes) -> ApiError | None:
    """Return why a request is refused that has these headers; None if it is not.

    Args:
        api_key: that it must have; empty: none.
        authorization, x_api_key: the headers of these names; empty: there is none.
    """
    if not api_key:
        return None
    scheme, _, token = authorization.partition(b" ")
    given = [token.strip() if scheme.lower() == b"bearer" else b"", x_api_key.strip()]
    if any(hmac.compare_digest(key, api_key) for key in given):
        return None
    problem = "is wrong" if token or x_api_key else "is missing"
    return ApiError(
        401,
        f"the API key {problem}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _request_id_refusal(request_id: str) -> ApiError | None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        problem = f"has {len(request_id)} characters; at most {MAX_REQUEST_ID_LENGTH} are taken"
    elif not _REQUEST_ID.fullmatch(request_id):
        problem = f"is {request_id!r}; it must consist of visible ASCII characters"
    else:
        return None
    return ApiError(400, f"X-Request-Id {problem}", code="invalid_request_id")
