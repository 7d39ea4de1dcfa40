"""Error answers: their shapes, and the one place that decides their status."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestQuarantinedError,
    RequestTimeoutError,
)
from quire.server.wire.access_log import note_error
from quire.server.wire.answers import ErrorDetail, ErrorResponse, encode
from quire.server.wire.raw_response import closing_response

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
UNAVAILABLE = "service_unavailable_error"
TIMEOUT = "timeout_error"


_REQUEST_CODES = {
    ContextLengthError: "context_length_exceeded",
    DuplicateRequestError: "duplicate_request_id",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorShape:
    """Error format of one API.

    Args:
        answer: type of the body.
        of: returns an error as a body.
        prefix: beginning of the API's paths, or several.
        id_headers: in which clients look for the request's id.
    """

    answer: type[msgspec.Struct]
    of: Callable[[ApiError], msgspec.Struct]
    prefix: str | tuple[str, ...] = "/"
    id_headers: tuple[str, ...] = ("X-Request-Id",)


def _openai_error(error: ApiError) -> ErrorResponse:
    detail = ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
    return ErrorResponse(error=detail)


OPENAI_ERRORS = ErrorShape(ErrorResponse, _openai_error)


def error_shape_of(scope: Mapping[str, Any]) -> ErrorShape:
    """Return the error shape of an ASGI request, as set by `RequestEnvelope`."""
    shape: ErrorShape = scope.get("state", {}).get("error_shape", OPENAI_ERRORS)
    return shape


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status code.
        message: what is wrong, the value, the limit and what to do.
        kind: OpenAI's error type.
        param: the request field at fault, if any.
        code: a short machine-readable reason, if any.
        headers: more headers of the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, shape: ErrorShape = OPENAI_ERRORS) -> bytes:
        """Return the JSON body in an API's shape."""
        return encode(shape.of(self))

    def response(self, shape: ErrorShape = OPENAI_ERRORS) -> Response:
        """Return the whole HTTP response."""
        return _ErrorAnswer(self, shape)

    def closing_response(self) -> bytes:
        """Return the raw HTTP response, for a connection that closes after it."""
        return closing_response(self.status, "application/json", self.body(), headers=self.headers)

    @property
    def reason(self) -> str:
        """The error's code and field, without anything quoted from the request."""
        return f"{self.code or self.kind}:{self.param}" if self.param else self.code or self.kind


class _ErrorAnswer(Response):
    """Convert an error to an answer, and record it in the access log."""

    def __init__(self, error: ApiError, shape: ErrorShape) -> None:
        super().__init__(error.body(shape), error.status, error.headers, media_type="application/json")
        self._reason = error.reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        note_error(scope, self._reason)
        await super().__call__(scope, receive, send)


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def as_api_error(error: Exception, *, request_id: str = "") -> ApiError:
    """Convert an exception to an error answer; unexpected ones are logged here and not disclosed.

    Args:
        error: any exception raised while serving a request.
        request_id: the X-Request-Id of the request, for the log.
    """
    answer = _expected(error)
    if answer is not None:
        return answer
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500,
        f"internal error; the server's log has the details under request id {request_id!r}",
        kind=SERVER_ERROR,
        code="internal_error",
    )


def _expected(error: Exception) -> ApiError | None:
    """Convert an exception whose message is meant for the client; None for any other."""
    answer: ApiError | None = None
    match error:
        case ApiError():
            answer = error
        case InvalidRequestError():
            answer = ApiError(400, str(error), param=error.param, code=_REQUEST_CODES.get(type(error)))
        case QueueFullError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            answer = ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case RequestTimeoutError():
            answer = ApiError(504, str(error), kind=TIMEOUT, code="timeout")
        case RequestQuarantinedError():
            answer = ApiError(500, str(error), kind=SERVER_ERROR, code="quarantined")
        case EngineAsleepError():
            answer = ApiError(503, str(error), kind=UNAVAILABLE, code="engine_asleep")
        case EngineDeadError():
            answer = ApiError(503, str(error), kind=UNAVAILABLE, code="engine_dead")
        case HTTPException():
            answer = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return answer
