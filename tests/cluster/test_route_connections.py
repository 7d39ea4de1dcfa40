"""What a router does about clients that are slow, many, or do not read: as the server of an engine."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import pytest
import uvloop
from fake_upstream import HEAD_OF_STREAM, FakeEngine, chunk, running

from connection_contract import ConnectionContract, Served
from quire.cluster.route import routing
from quire.config import ConnectionConfig, RouterConfig
from quire.server.http.listening import bound_socket, url_of
from raw_http import request

EVENT = b"data: " + b"x" * 9990 + b"\n\n"


class Engine(FakeEngine):
    """Holds some requests, and answers others without end."""

    def __init__(self):
        super().__init__()
        self.held_one, self.ended = threading.Event(), threading.Event()

    async def answer(self, seen, reader, writer):
        if b'"hold"' in seen.content:
            self.held_one.set()
            await reader.read()  # until the router leaves
            raise ConnectionError
        if b'"endless"' not in seen.content:
            await super().answer(seen, reader, writer)
            return
        writer.write(HEAD_OF_STREAM)
        try:
            while True:
                writer.write(chunk(EVENT))
                await writer.drain()
                self.num_sent += len(EVENT)
        finally:
            self.ended.set()


def completion(prompt):
    return request("/v1/completions", method="POST", body=b'{"prompt": "%s"}' % prompt)


class ServedRouter(Served):
    held = completion(b"hold")
    endless = completion(b"endless")

    def __init__(self, engine, url):
        self.url = url
        self._engine = engine

    def wait_for_held(self):
        assert self._engine.held_one.wait(60)

    def wait_for_end(self):
        assert self._engine.ended.wait(60)
        return self._engine.num_sent

    def served_calls(self):
        return self._engine.seen


@contextlib.contextmanager
def routed(limits):
    """Serve a router and its engine in a thread."""
    started, end = Future(), Future()

    async def route(bound):
        engine = Engine()
        async with running(engine):
            config = RouterConfig(engine=(engine.url,), connections=ConnectionConfig(**limits))
            async with routing(config, bound):
                started.set_result(engine)
                await asyncio.wrap_future(end)

    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        url = url_of("127.0.0.1", bound)
        thread = threading.Thread(target=lambda: uvloop.run(route(bound)))
        thread.start()
        try:
            yield ServedRouter(started.result(60), url)
        finally:
            end.set_result(None)
            thread.join(60)
            assert not thread.is_alive()


class TestRouter(ConnectionContract):
    @pytest.fixture
    def serve(self):
        with contextlib.ExitStack() as stack:
            yield lambda **limits: stack.enter_context(routed(limits))
