"""The page at /: files sent from memory, with headers that restrict it to its own server.

The files hold no secrets and need no key. If the server needs one, the page asks its user for it, and sends
it with all its API requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}

_CONTENT_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # text never becomes HTML: the browser refuses innerHTML
    "trusted-types": "'none'",
}

_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _CONTENT_POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # may be cached, but revalidated by its ETag
}


def page_files(*, needs_key: bool) -> dict[str, bytes]:
    """Return the files by URL path; one of them tells the page whether the API `needs_key`."""
    folder = resources.files("quire.server").joinpath("page")
    files = {f"/page/{file.name}": file.read_bytes() for file in folder.iterdir()}
    return {
        "/": files.pop("/page/index.html"),
        "/page/server.json": json.dumps({"needs_key": needs_key}).encode(),
        **files,
    }


def page_routes(files: Mapping[str, bytes]) -> list[Route]:
    """Return a route for each of the files."""
    return [_route(path, content) for path, content in files.items()]


def _route(path: str, content: bytes) -> Route:
    etag = f'"{hashlib.blake2s(content, digest_size=16).hexdigest()}"'
    media_type = _MEDIA_TYPES[PurePosixPath(path).suffix or ".html"]
    headers = {**_HEADERS, "ETag": etag}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route(path, answer, methods=["GET"])
