"""API keys: extraction from requests, and comparison by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from quire.server.wire.errors import ApiError


def key_digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key, for lookups.

    The time of a lookup may leak information about digests, which cannot be chosen or inverted, but not about
    keys.
    """
    return hashlib.sha256(key).digest()


def digests_of(keys: str) -> frozenset[bytes]:
    """Return the digests of space-separated keys."""
    return frozenset(key_digest(key.encode()) for key in keys.split())


def presented_keys(authorization: bytes, x_api_key: bytes) -> Iterator[bytes]:
    """Yield the keys in these headers of a request; an empty header is missing."""
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() == b"bearer" and (token := token.strip()):
        yield token
    if x_api_key := x_api_key.strip():
        yield x_api_key


def key_refusal(authorization: bytes, x_api_key: bytes) -> ApiError:
    """Return the error for a request without a valid key in these headers."""
    problem = "is wrong" if any(presented_keys(authorization, x_api_key)) else "is missing"
    return ApiError(
        401,
        f"the API key {problem}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
