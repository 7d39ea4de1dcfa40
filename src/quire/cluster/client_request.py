"""A client's request, as the router passes it on."""

from __future__ import annotations

import dataclasses
import time
import urllib.parse

from starlette.types import Scope, Send

from quire.cluster.engines.upstream import REQUEST_ID, Headers, is_end_to_end
from quire.errors import InvalidRequestError
from quire.server.calls.request_start import REQUEST_START, request_start

_ASCII = "".join(map(chr, range(0x21, 0x7F)))


@dataclasses.dataclass(slots=True)
class ClientRequest:
    """A request whose body has been read.

    Args:
        scope: of the request (ASGI).
        send: takes its answer (ASGI).
        body: of the request.
        is_answered: whether its answer has been sent to the end.
        start: when it came, in seconds since the epoch.
    """

    scope: Scope
    send: Send
    body: bytes
    is_answered: bool = False
    start: float = dataclasses.field(default_factory=time.time)

    @property
    def path(self) -> str:
        """The path, decoded."""
        path: str = self.scope["path"]
        return path

    @property
    def target(self) -> str:
        """The path and the query as they were sent, with bytes that are no ASCII escaped."""
        path, query = self.scope["raw_path"], self.scope["query_string"]
        return urllib.parse.quote(path + b"?" + query if query else path, safe=_ASCII)

    def headers(self) -> Headers:
        """Return the headers that engines get: those that are not about the connection, and its id and start.

        Raises:
            InvalidRequestError: a header is not UTF-8.
        """
        headers = Headers()
        for name, value in self.scope["headers"]:
            if is_end_to_end(name):
                try:
                    headers.add(name.decode(), value.decode())
                except UnicodeDecodeError:
                    shown = name.decode("ascii", "replace")
                    raise InvalidRequestError(f"the header {shown} is not UTF-8", param=shown) from None
        headers[REQUEST_ID] = self.scope["state"]["request_id"]
        headers[REQUEST_START] = request_start(self.start)
        return headers
