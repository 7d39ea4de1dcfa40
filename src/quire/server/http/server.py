"""Serving an application over HTTP: uvicorn's request cycle on Quire's connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from quire.config import ConnectionConfig
from quire.server.http.acceptor import Acceptor
from quire.server.http.connections import Connection, Connections, FairReads, default_limit
from quire.server.http.protocol import HttpProtocol
from quire.server.http.stopping import cancelled_at_end
from quire.server.wire.access_log import AccessLog

logger = logging.getLogger(__name__)

LAST_BYTES_TIMEOUT = 1.0
"""Seconds at shutdown to send complete answers."""

LAST_WORD_TIMEOUT = 0.5
"""Seconds at an immediate shutdown, to send abort errors."""

_LOOK_INTERVAL = 0.01  # seconds between checks


class HttpServer:
    """Serves an application, without handling signals and without uvicorn's log lines.

    Args:
        app: the application to serve.
        limits: limits of connections.
        tls: TLS context of connections; None: no TLS.
        log: logs requests that do not reach `app`; None: none.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionConfig,
        tls: ssl.SSLContext | None = None,
        log: AccessLog | None = None,
    ) -> None:
        self._last_bytes_timeout = LAST_BYTES_TIMEOUT
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            http="httptools",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self._state = ServerState()
        self._limits = limits
        self._tls = tls
        self._log = log

    def hasten_end(self) -> None:
        """Stop at once; clients only get time to receive the abort errors."""
        self._last_bytes_timeout = LAST_WORD_TIMEOUT

    @contextlib.asynccontextmanager
    async def serving(self, bound: socket.socket) -> AsyncIterator[None]:
        """Serve on a socket for the duration of the context, and close it at the end.

        Connections are accepted as soon as the context begins.

        Args:
            bound: bound socket that is not listening yet.
        """
        self._config.load()
        self._set_date()
        limits = self._limits
        connections = Connections(limits.max_connections or default_limit())
        turns = FairReads(asyncio.get_running_loop())

        def make_protocol(handshake: Connection) -> asyncio.Protocol:
            return HttpProtocol(
                self._config,
                self._state,
                limits,
                connections,
                handshake,
                turns=turns,
                access_log=self._log,
            )

        acceptor = Acceptor(
            bound,
            make_protocol,
            connections,
            tls=self._tls,
            handshake_timeout=limits.header_timeout,
            write_timeout=limits.write_timeout,
        )
        try:
            async with cancelled_at_end(self._keep_date()):
                yield
        finally:
            acceptor.close()
            bound.close()
            await self._close_connections()

    async def _keep_date(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._set_date()

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    async def _close_connections(self) -> None:
        """Close all connections, waiting a limited time for unfinished answers."""
        state = self._state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._last_bytes_timeout):
                while state.connections or state.tasks:
                    await asyncio.sleep(_LOOK_INTERVAL)
        if state.tasks:
            logger.warning("%d requests were cancelled before their answers were complete", len(state.tasks))
        for task in state.tasks:
            task.cancel()
