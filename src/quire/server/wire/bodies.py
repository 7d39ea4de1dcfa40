"""Reading the bodies of requests, up to a limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from quire.server.wire.decompression import Decompressor
from quire.server.wire.errors import ApiError, ClientGoneError


async def bounded_body(request: Request, limit: int, decompressor: Decompressor | None = None) -> bytes:
    """Return a request's body.

    Args:
        request: whose body it is.
        limit: the maximum of its size, in bytes, as it is sent and when it is decompressed.
        decompressor: what it is decompressed with; None: it is sent as it is.

    Raises:
        ApiError: 413, it is larger.
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
        raise ClientGoneError("the client left while it sent its request") from None
    if decompressor is not None:
        decompressor.finish()
    return b"".join(chunks)


def _body_too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more; the limit is {limit} (the server's max_body_bytes)",
        code="body_too_large",
    )
