"""`route`: runs a router until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator

import uvloop

from quire.cluster.app import create_app
from quire.cluster.engines.registry import EngineState
from quire.cluster.router import Router
from quire.config import RouterConfig
from quire.server.http.connections import raise_descriptor_limit
from quire.server.http.listening import Listener, listener
from quire.server.http.server import HttpServer
from quire.server.http.stopping import StopSignals, announce_stop, finished_unless_set
from quire.server.monitoring.port import monitoring_socket
from quire.server.monitoring.probes import MonitoredServer
from quire.server.wire.access_log import AccessLog, access_log


def route(config: RouterConfig) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish and return.

    A second signal stops at once. Call it from the main thread.

    Args:
        config: configuration of the router.

    Raises:
        ConfigError: the router cannot listen at the address, or its certificate is unusable.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    raise_descriptor_limit()
    edge = config.edge
    with (
        listener(config.host, config.port, edge) as listening,
        monitoring_socket(config.host, edge.monitoring_port) as monitoring,
        access_log(edge.access_log) as log,
    ):
        uvloop.run(_route_until_stopped(config, listening, monitoring, log))


@contextlib.asynccontextmanager
async def routing(
    config: RouterConfig,
    bound: socket.socket,
    tls: ssl.SSLContext | None = None,
    log: AccessLog | None = None,
    *,
    immediate: asyncio.Event | None = None,
) -> AsyncIterator[Router]:
    """Serve a router on a socket for the duration of the context; yielded when it accepts connections.

    Args:
        config: the router's configuration.
        bound: socket to listen on.
        tls: TLS context for clients' connections; None: no TLS.
        log: access log; None: none.
        immediate: set to stop at once; None: never set.
    """
    router = Router(config)
    server = HttpServer(create_app(router, log), config.connections, tls, log)
    try:
        await router.start()
        async with server.serving(bound):
            try:
                yield router
            finally:
                router.stop_serving()
                if immediate is not None and immediate.is_set():
                    server.hasten_end()
    finally:
        await router.close()


async def _route_until_stopped(
    config: RouterConfig, listening: Listener, monitoring: socket.socket | None, log: AccessLog | None
) -> None:
    stop = StopSignals(config.drain_timeout)
    with stop.installed():
        async with (
            listening.with_current_certificate(),
            routing(config, listening.socket, listening.tls, log, immediate=stop.immediate) as router,
            monitored(router, monitoring),
        ):
            _announce(router, listening.url)
            await stop.graceful.wait()
            router.calls.begin_drain()
            num_running = router.num_serving
            if num_running:
                announce_stop(num_running, config.drain_timeout)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain_timeout):
                    await finished_unless_set(stop.immediate, router.calls.wait_idle())


@contextlib.asynccontextmanager
async def monitored(router: Router, bound: socket.socket | None) -> AsyncIterator[None]:
    """Answer on the monitoring port, if there is one, for the duration of the context."""
    if bound is None:
        yield
        return
    async with MonitoredServer(router.health, router.metrics.exposition).answering(bound):
        yield


def _announce(router: Router, url: str) -> None:
    """Print that the router is ready, and where."""
    engines = router.engines.by_url.values()
    num_up = sum(engine.state is EngineState.UP for engine in engines)
    print(f"Ready: {url} ({num_up} of {len(engines)} engines are up)", flush=True)
