"""Bodies that are compressed; no more of them is ever made than their limit and one byte."""

from __future__ import annotations

import zlib

from quire.errors import InvalidRequestError

_GZIP = 16 + zlib.MAX_WBITS
_WITHOUT_HEADER = -zlib.MAX_WBITS


class Decompressor:
    """Decompresses one body as its chunks come.

    Args:
        encoding: one of `ENCODINGS`.
        limit: bytes of the decompressed body.
    """

    def __init__(self, encoding: str, limit: int) -> None:
        self._encoding = encoding
        self._room = limit + 1
        self._stream = None if encoding == "deflate" else zlib.decompressobj(_GZIP)

    def decompress(self, chunk: bytes) -> bytes:
        """Return what is in the next chunk, at most one byte more than the limit allows.

        Raises:
            InvalidRequestError: it is not compressed so, or something follows the compressed body.
        """
        if not chunk or not self._room:
            return b""
        if self._stream is None:  # deflate: zlib's form, but many clients leave its header out
            has_header = chunk[0] & 0x0F == zlib.DEFLATED
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if has_header else _WITHOUT_HEADER)
        try:
            data = self._stream.decompress(chunk, self._room)
        except zlib.error as error:
            raise self._refusal(str(error)) from None
        self._room -= len(data)
        if self._stream.unused_data:
            raise self._refusal("something follows its end")
        return data

    def finish(self) -> None:
        """Raise `InvalidRequestError` if the end of the compressed body has not come."""
        if self._stream is None or not self._stream.eof:
            raise self._refusal("it ends too early")

    def _refusal(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"the body is not valid {self._encoding}: {reason:.200}")


ENCODINGS = ("gzip", "deflate")
