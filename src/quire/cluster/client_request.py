"""A client's request, as the router forwards it."""

from __future__ import annotations

import dataclasses
import time
import urllib.parse
from collections.abc import AsyncIterator

from starlette.types import Scope, Send

from quire.cluster.engines.upstream import REQUEST_ID, Headers, is_end_to_end
from quire.errors import InvalidRequestError
from quire.front.text.tokenized_prompt import HEADER as PROMPT
from quire.server.calls.request_start import REQUEST_START, request_start
from quire.server.calls.stream_progress import PROGRESS
from quire.server.wire.bodies import CONTINUATION

_ASCII = "".join(map(chr, range(0x21, 0x7F)))


@dataclasses.dataclass(slots=True)
class ClientRequest:
    """A request whose body has been read, or is passed on as it arrives.

    Args:
        scope: the request's ASGI scope.
        send: ASGI's send, for the answer.
        body: the request's body.
        pieces: the body as it arrives; None: it has been read.
        is_answered: whether the whole answer has been sent.
        start: time of arrival, in seconds since the epoch.
    """

    scope: Scope
    send: Send
    body: bytes
    pieces: AsyncIterator[bytes] | None = None
    is_answered: bool = False
    start: float = dataclasses.field(default_factory=time.time)

    @property
    def path(self) -> str:
        """The path, decoded."""
        path: str = self.scope["path"]
        return path

    @property
    def target(self) -> str:
        """The path and the query as they were sent, with bytes outside ASCII escaped."""
        path, query = self.scope["raw_path"], self.scope["query_string"]
        return urllib.parse.quote(path + b"?" + query if query else path, safe=_ASCII)

    def headers(self) -> Headers:
        """Return the headers for engines: all end-to-end headers, the request's id and its start.

        Engines are asked for the progress of streams, so that others can continue them.

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
        for name in (CONTINUATION, PROMPT):  # the router's own
            headers.popall(name, None)
        headers[PROGRESS] = "1"
        return headers
