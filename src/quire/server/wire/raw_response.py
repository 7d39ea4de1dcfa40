"""Raw HTTP responses, for connections outside the server library."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus


def closing_response(
    status: int,
    media_type: str,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    with_body: bool = True,
) -> bytes:
    """Return a whole response, after which the connection closes.

    Args:
        status: HTTP status.
        media_type: media type of the body.
        body: the body, which sets Content-Length even if it is left out.
        headers: more headers.
        with_body: whether to send the body; False for HEAD.
    """
    fields = {
        "Content-Type": media_type,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(headers or {}),
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body if with_body else b"")
