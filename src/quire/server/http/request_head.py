"""Strict checks of request headers, against request smuggling.

A proxy in front may split the bytes into requests differently than this server. So anything ambiguous is
refused; an attacker would otherwise hide a request in what one of the two takes for a body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.server.wire.errors import ApiError

END = b"\r\n\r\n"

_BEGINNING_LENGTH = 64  # bytes of a header that tell HTTP from other protocols
_BEGINNING = re.compile(rb"[A-Z-]{1,32}(?:\Z| [^\r\n]*(?:\Z|\r\Z|\r\n))")
_REQUEST_LINE = re.compile(rb"(?!CONNECT )[A-Z-]+ [!-~\x80-\xff]+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def beginning_refusal(received: bytes | bytearray) -> ApiError | None:
    """Refuse bytes that cannot start a valid header."""
    if _BEGINNING.match(received[:_BEGINNING_LENGTH]):
        return None
    return not_http("the request line is not that of an HTTP/1.1 request")


def not_http(reason: str) -> ApiError:
    """Return the answer to invalid HTTP/1.1."""
    return ApiError(400, f"this is not valid HTTP/1.1: {reason}", code="invalid_http")


def size_refusal(size: int, max_header_bytes: int) -> ApiError | None:
    """Refuse a header that is too large.

    Args:
        size: bytes of the header so far.
        max_header_bytes: the maximum.
    """
    if size <= max_header_bytes:
        return None
    return ApiError(
        431,
        f"the header has {size} bytes or more; the limit is {max_header_bytes} (max_header_bytes)",
        code="header_too_large",
    )


def head_refusal(head: bytes, max_headers: int) -> ApiError | None:
    """Refuse a complete header with an unsupported version or method, or too many fields."""
    if not _REQUEST_LINE.match(head):
        return not_http("the request line is not that of an HTTP/1.1 request")
    num_headers = head.count(b"\r\n") - 2
    if num_headers > max_headers:
        return ApiError(
            431,
            f"the request has {num_headers} header fields; the limit is {max_headers} (max_headers)",
            code="header_too_large",
        )
    return None


def without_upgrade(head: bytes) -> bytes:
    """Return a header without upgrade offers, which are declined by ignoring them.

    The parser would treat what follows as the other protocol, and lose the body.
    """
    return _UPGRADE.sub(b"", head)


def framing_refusal(version: str, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuse framing that the parser accepts, but a proxy in front may read differently.

    The parser itself refuses a request with Content-Length and Transfer-Encoding, or two of either.

    Args:
        version: HTTP version.
        headers: pairs of names, in lower case, and values.
    """
    encodings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if encodings and (encodings != [b"chunked"] or version != "1.1"):
        message = "the only transfer encoding served is chunked, with HTTP/1.1"
        return ApiError(501, message, code="unsupported_transfer_encoding")
    return None
