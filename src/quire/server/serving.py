"""From a loading engine to a graceful stop: signals, draining, and the HTTP server between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from quire.config import ServerConfig
from quire.front.async_llm import AsyncLLM
from quire.server.app import create_app
from quire.server.context import ServerContext
from quire.server.http_server import HttpServer
from quire.server.listening import url_of

OnProgress = Callable[[int, int], None]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _StopSignals:
    """Counts SIGTERM and Ctrl-C: the first asks for a graceful stop, the second for an immediate one."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()

    def _received(self) -> None:
        if self.graceful.is_set():
            self.immediate.set()
        self.graceful.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._received)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)


async def serve_until_stopped(
    llm: AsyncLLM,
    config: ServerConfig,
    bound: socket.socket,
    loading: contextlib.AbstractContextManager[OnProgress | None],
) -> None:
    """Wait for the engine, serve it on `bound` until a stop signal, let requests finish, shut it down.

    Args:
        llm: the engine's front door, perhaps not ready yet.
        config: of the HTTP front.
        bound: a bound socket that does not listen yet.
        loading: entered while the model loads; what it gives is called with (bytes done, bytes in all).

    Raises:
        QuireError: why the engine did not start.
    """
    stop = _StopSignals()
    with stop.installed():
        try:
            with loading as on_progress:
                ready = await _finished_unless_set(stop.graceful, llm.wait_until_ready(on_progress))
            if ready:
                await _serve_engine(llm, config, bound, stop)
        finally:
            await llm.shutdown()


async def _serve_engine(
    llm: AsyncLLM, config: ServerConfig, bound: socket.socket, stop: _StopSignals
) -> None:
    app = create_app(llm, config)
    context: ServerContext = app.state.context
    url = url_of(config.host, bound)
    server = HttpServer(app, lambda: _announce(context, url))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    stopping = asyncio.create_task(_stop_gracefully(context, stop))
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.force_exit = stop.immediate.is_set()
    server.should_exit = True
    stopping.cancel()
    await serving
    with contextlib.suppress(asyncio.CancelledError):
        await stopping


async def _stop_gracefully(context: ServerContext, stop: _StopSignals) -> None:
    """After the first signal: refuse new requests, wait for the running ones, abort what is left."""
    await stop.graceful.wait()
    lifecycle, patience = context.lifecycle, context.config.drain_timeout
    lifecycle.begin_drain()
    live = len(lifecycle.live_request_ids)
    if live:
        print(f"Stopping: {live} still running, for at most {patience:g} s.", file=sys.stderr, flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await _finished_unless_set(stop.immediate, lifecycle.wait_idle())
    for request_id in lifecycle.live_request_ids:
        context.llm.abort(request_id)


async def _finished_unless_set(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Return True when `work` is done, or cancel it and return False when `event` is set first."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, waiting):
            pending.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


def _announce(context: ServerContext, url: str) -> None:
    """Print that the server is ready, where, and a command to try."""
    info = context.llm.info
    key = " -H 'Authorization: Bearer '$QUIRE_API_KEY" if context.config.api_key else ""
    question = f'{{"model": "{context.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(
        f"Ready: {url} ({context.model_name}, {info.dtype}, loaded in {info.load_seconds:.1f} s)\n"
        f"Try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{question}'",
        flush=True,
    )
