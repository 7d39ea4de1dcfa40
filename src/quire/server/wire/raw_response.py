"""HTTP responses as bytes, for connections that no server library answers."""

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
        status: of the answer.
        media_type: of the body.
        body: whose length the response has, even if it is left out.
        headers: further ones.
        with_body: whether the body is sent; an answer to HEAD has none.
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
