"""Reading request bodies, compressed or not, up to a limit."""

from __future__ import annotations

import zlib

from starlette.requests import ClientDisconnect, Request

from quire.errors import InvalidRequestError
from quire.server.wire.errors import ApiError, ClientGoneError

CONTINUATION = "X-Quire-Continuation"
"""Request header: how many bytes behind the body are the progress of a stream to continue."""

MAX_PROGRESS = 1 << 20
"""Maximum size of a stream's progress in bytes, 14 per token; a longer stream cannot be continued."""


def size_behind(request: Request, header: str, limit: int) -> int:
    """Return how many bytes behind a request's body a header announces; 0: it has no such header.

    Raises:
        InvalidRequestError: the header is not a number of bytes up to `limit`.
    """
    given = request.headers.get(header)
    if given is None:
        return 0
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 0 < int(given) <= limit):
        raise InvalidRequestError(
            f"{header} is {given!r:.40}; it must be between 1 and {limit} bytes", param=header
        )
    return int(given)


async def bounded_body(request: Request, limit: int, decompressor: Decompressor | None = None) -> bytes:
    """Return a request's body.

    Args:
        request: the request.
        limit: maximum size in bytes, both as sent and decompressed.
        decompressor: decompresses the body; None: it is not compressed.

    Raises:
        ApiError: 413: the body is larger.
        ClientGoneError: the connection closed before the body was complete.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _body_too_large(int(declared), limit)
    chunks: list[bytes] = []
    size = sent = 0
    try:
        async for chunk in request.stream():
            sent += len(chunk)
            data = chunk if decompressor is None else decompressor.decompress(chunk)
            size += len(data)
            if max(size, sent) > limit:
                raise _body_too_large(max(size, sent), limit)
            chunks.append(data)
    except ClientDisconnect:
        raise ClientGoneError("the client disconnected while sending its request") from None
    if decompressor is not None:
        decompressor.finish()
    return b"".join(chunks)


def _body_too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more; the limit is {limit} (the server's max_body_bytes)",
        code="body_too_large",
    )


_GZIP = 16 + zlib.MAX_WBITS
_WITHOUT_HEADER = -zlib.MAX_WBITS


class Decompressor:
    """Decompresses one body chunk by chunk.

    Args:
        encoding: one of `ENCODINGS`.
        limit: maximum bytes of the decompressed body.
    """

    def __init__(self, encoding: str, limit: int) -> None:
        self._encoding = encoding
        self._room = limit + 1
        self._stream = None if encoding == "deflate" else zlib.decompressobj(_GZIP)

    def decompress(self, chunk: bytes) -> bytes:
        """Decompress the next chunk; returns at most one byte more than the limit allows.

        Raises:
            InvalidRequestError: it is not compressed like this, or data follows the compressed body.
        """
        if not chunk or not self._room:
            return b""
        if self._stream is None:  # deflate: zlib format, but many clients omit its header
            has_header = chunk[0] & 0x0F == zlib.DEFLATED
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if has_header else _WITHOUT_HEADER)
        try:
            data = self._stream.decompress(chunk, self._room)
        except zlib.error as error:
            raise self._refusal(str(error)) from None
        self._room -= len(data)
        if self._stream.unused_data:
            raise self._refusal("data follows its end")
        return data

    def finish(self) -> None:
        """Raise `InvalidRequestError` if the compressed body is incomplete."""
        if self._stream is None or not self._stream.eof:
            raise self._refusal("it ends too early")

    def _refusal(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"the body is not valid {self._encoding}: {reason:.200}")


ENCODINGS = ("gzip", "deflate")
