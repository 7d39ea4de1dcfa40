"""uvicorn, fitted into a program that handles signals itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

_KEEP_ALIVE = 60  # seconds; longer than clients keep idle connections, so that they close them first
_LAST_BYTES_TIMEOUT = 5  # seconds; for answers that are complete in the engine but not yet sent


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling and its log lines.

    Args:
        app: the application to serve.
        on_listening: called once, when connections are accepted.
    """

    def __init__(self, app: ASGIApp, on_listening: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT,
            )
        )
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets=sockets)
        self._on_listening()
