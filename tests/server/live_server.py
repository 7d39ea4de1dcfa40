"""The real HTTP server in a thread."""

import asyncio
import contextlib
import threading

from quire.server.listening import bound_socket
from quire.server.serve import http_server

MAX_BODY_BYTES = 1_000_000


@contextlib.contextmanager
def served(app):
    """Serve `app` with the real HTTP server in a thread; yields its URL."""
    listening = threading.Event()
    server = http_server(app, listening.set)
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
        thread.start()
        try:
            assert listening.wait(60)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
