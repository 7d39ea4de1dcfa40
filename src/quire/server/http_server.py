"""uvicorn with Quire's connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from quire.config import ConnectionConfig
from quire.server.acceptor import Acceptor
from quire.server.access_log import AccessLog
from quire.server.connections import Connection, Connections, default_limit
from quire.server.http_protocol import HttpProtocol
from quire.server.loop_turns import LoopTurns


class HttpServer(uvicorn.Server):
    """Serves an application on sockets that are given to `serve`, without handling signals.

    Args:
        config: of uvicorn.
        limits: what connections may take.
        on_listening: called once, when connections are accepted.
        log: where a request is logged that does not get as far as the application; None: nowhere.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionConfig,
        on_listening: Callable[[], None],
        log: AccessLog | None = None,
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._on_listening = on_listening
        self._log = log

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        limits = self._limits
        connections = Connections(limits.max_connections or default_limit())
        turns = LoopTurns(asyncio.get_running_loop())

        def make_protocol(handshake: Connection) -> asyncio.Protocol:
            return HttpProtocol(
                self.config,
                self.server_state,
                limits,
                connections,
                handshake,
                turns=turns,
                access_log=self._log,
            )

        self.servers: list[Acceptor] = [  # type: ignore[assignment]  # uvicorn closes them, and no more
            Acceptor(
                listener,
                make_protocol,
                connections,
                tls=self.config.ssl,
                handshake_timeout=limits.header_timeout,
                write_timeout=limits.write_timeout,
            )
            for listener in sockets or []
        ]
        self.started = True
        self._on_listening()
