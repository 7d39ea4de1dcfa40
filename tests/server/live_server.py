"""The real HTTP server in a thread."""

import asyncio
import contextlib
import socket
import threading

from quire.server.http_server import HttpServer

MAX_BODY_BYTES = 1_000_000


@contextlib.contextmanager
def served(app):
    """Serve `app` with the real HTTP server in a thread; yields its URL."""
    listening = threading.Event()
    server = HttpServer(app, listening.set)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
        thread.start()
        try:
            assert listening.wait(20)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
