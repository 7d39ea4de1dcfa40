"""The access log of the router; its figures of tokens are in the logs of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from quire.server.access_log import CLIENT_LEFT, AccessLog, AccessRecord

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
"""Key of a request: its X-Request-Id, or the one that it was given."""

ERROR_REASON = web.ResponseKey("error_reason", str)
"""Key of a response: what went wrong, in a word."""


def access_logging(log: AccessLog) -> Any:
    """Return an aiohttp middleware that logs each request when it ends."""

    @web.middleware
    async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = AccessRecord(
            client=request.remote or "unix", method=request.method, path=request.rel_url.raw_path
        )
        try:
            response = await handler(request)
        except BaseException as error:
            left = isinstance(error, asyncio.CancelledError | ConnectionResetError)
            record.status, record.error = (CLIENT_LEFT, "client_left") if left else (500, "internal_error")
            raise
        else:
            record.status = response.status
            record.error = response.get(ERROR_REASON, "")
            return response
        finally:
            record.request_id = request.get(REQUEST_ID, "")
            log.write(record)

    return logged
