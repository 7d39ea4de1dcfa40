"""Which API's clients a path is for: what its errors look like, and which headers have a request's id."""

from __future__ import annotations

from quire.server.anthropic.answers import error_answer
from quire.server.ollama.answers import error_text
from quire.server.wire.errors import ErrorShape, openai_error

_ANTHROPIC = "/v1/messages"
_SHAPES: dict[str, ErrorShape] = {_ANTHROPIC: error_answer, "/api/": error_text}


def error_shape_of(path: str) -> ErrorShape:
    """Return the shape of a path's errors."""
    for beginning, shape in _SHAPES.items():
        if path.startswith(beginning):
            return shape
    return openai_error


def request_id_headers_of(path: str) -> tuple[str, ...]:
    """Return the headers in which a path's clients look for the request's id."""
    return ("X-Request-Id", "Request-Id") if path.startswith(_ANTHROPIC) else ("X-Request-Id",)
