"""The real HTTP server in a thread."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import uvloop

from quire.config import ConnectionConfig, EdgeConfig
from quire.server.http.listening import listener
from quire.server.http.server import HttpServer

MAX_BODY_BYTES = 1_000_000


@contextlib.contextmanager
def served(app, listens=None, log=None, start=None, **limits):
    """Serve `app` with the real HTTP server in a thread, on a free port if none is given; yields its URL.

    `start` is awaited first, and `limits` are those of connections.
    """
    with contextlib.ExitStack() as stack:
        if listens is None:
            listens = stack.enter_context(listener("127.0.0.1", 0, EdgeConfig()))
        end = Future()

        async def serve():
            if start is not None:
                await start()
            async with HttpServer(app, ConnectionConfig(**limits), listens.tls, log).serving(listens.socket):
                listening.set_result(None)
                await asyncio.wrap_future(end)

        listening = Future()
        thread = threading.Thread(target=lambda: uvloop.run(serve()))
        thread.start()
        try:
            listening.result(60)
            yield listens.url
        finally:
            end.set_result(None)
            thread.join(60)
            assert not thread.is_alive()
