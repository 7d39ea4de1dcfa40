"""Which API's clients a path is for, and so which shape its errors have, whoever refuses the request."""

from __future__ import annotations

from quire.server.anthropic.answers import error_answer
from quire.server.errors import ErrorShape, openai_error
from quire.server.ollama.answers import error_text

_SHAPES: dict[str, ErrorShape] = {"/v1/messages": error_answer, "/api/": error_text}


def error_shape_of(path: str) -> ErrorShape:
    """Return the shape of a path's errors."""
    for beginning, shape in _SHAPES.items():
        if path.startswith(beginning):
            return shape
    return openai_error
