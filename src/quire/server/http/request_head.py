"""Strict checks of request headers, against request smuggling.

A proxy in front may divide what it passes on into other requests than this server does. So whatever could
be read in two ways is refused: an attacker would hide a request in what one of the two takes for a body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.server.wire.errors import ApiError

END = b"\r\n\r\n"

_BEGINNING_LENGTH = 64  # bytes; of a header, to tell HTTP from anything else
_BEGINNING = re.compile(rb"[A-Z-]{1,32}(?:\Z| [^\r\n]*(?:\Z|\r\Z|\r\n))")
_REQUEST_LINE = re.compile(rb"(?!CONNECT )[A-Z-]+ [!-~\x80-\xff]+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def beginning_refusal(received: bytes | bytearray) -> ApiError | None:
    """Refuse bytes that cannot begin a valid header."""
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
    """Refuse a complete header whose version, method or number of fields is not served."""
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
    """Return a header without any offer to speak another protocol, which is declined by not mentioning it.

    The parser would take what follows for that protocol, and lose the body.
    """
    return _UPGRADE.sub(b"", head)


def framing_refusal(version: str, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuse what the parser accepts, and a proxy in front may divide in another way.

    The parser itself refuses a request with Content-Length and Transfer-Encoding, or two of either.

    Args:
        version: of HTTP.
        headers: names in lower case, and values.
    """
    encodings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if encodings and (encodings != [b"chunked"] or version != "1.1"):
        message = "the only transfer encoding served is chunked, with HTTP/1.1"
        return ApiError(501, message, code="unsupported_transfer_encoding")
    return None
