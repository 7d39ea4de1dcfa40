"""The real HTTP server in a thread."""

import contextlib
import threading

import uvloop

from quire.config import ConnectionConfig, EdgeConfig
from quire.server.listening import listener
from quire.server.serve import http_server

MAX_BODY_BYTES = 1_000_000


@contextlib.contextmanager
def served(app, listens=None, log=None, **limits):
    """Serve `app` with the real HTTP server in a thread, on a free port if none is given; yields its URL.

    `limits` are those of connections.
    """
    listening = threading.Event()
    with contextlib.ExitStack() as stack:
        if listens is None:
            listens = stack.enter_context(listener("127.0.0.1", 0, EdgeConfig()))
        server = http_server(app, listening.set, ConnectionConfig(**limits), listens.tls, log)
        bound = listens.socket
        thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[bound])))
        thread.start()
        try:
            assert listening.wait(60)
            yield listens.url
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
