"""What a connection may take: time, memory, turns and a place, over real sockets."""

import asyncio
import contextlib
import os
import resource
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import served
from starlette.responses import Response

from call_through import call_through
from connection_contract import SHORT, ConnectionContract, Served, answer_to_new
from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.http import connections, request_head
from quire.server.http import protocol as http_protocol
from quire.server.http.connections import Connections, Deadline, default_limit
from quire.server.wire.errors import ApiError
from quire.server.wire.streaming import event_stream
from raw_http import COMPLETION, RawConnection, chunked, completion_head, request

HOLD = request("/v1/completions", method="POST", body=b'{"model": "fake", "prompt": "hold"}')


@pytest.fixture
def serving(llm):
    """Serve `llm`, or another application, with limits; returns a function that makes connections."""
    with contextlib.ExitStack() as stack:

        def serve(app=None, **limits):
            url = stack.enter_context(served(app or create_app(llm, ServerConfig()), **limits))

            def new(**options):
                return stack.enter_context(contextlib.closing(RawConnection(url, **options)))

            return new

        yield serve


class ServedEngine(Served):
    held = HOLD
    endless = request("/endless")

    def __init__(self, llm):
        self._llm = llm
        self._app = create_app(llm, ServerConfig())
        self._num_sent = 0
        self._ended = threading.Event()

    def wait_for_held(self):
        assert self._llm.held_seen.wait(60)

    def wait_for_end(self):
        assert self._ended.wait(60)
        return self._num_sent

    def served_calls(self):
        return self._llm.seen

    async def app(self, scope, receive, send):
        """Serve the engine, and the endless answer."""
        if scope["path"] == "/endless":
            await (await event_stream(receive, self._events(), ApiError.body, request_id="1"))(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)

    async def _events(self):
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 10_000
                self._num_sent += 10_000
        finally:
            self._ended.set()


class TestServer(ConnectionContract):
    @pytest.fixture
    def serve(self, llm):
        with contextlib.ExitStack() as stack:

            def start(**limits):
                server = ServedEngine(llm)
                server.url = stack.enter_context(served(server.app, **limits))
                return server

            yield start


def test_a_request_does_not_start_before_its_body_is_there(serving):
    started = []

    async def app(scope, receive, send):
        started.append(scope["path"])
        await Response()(scope, receive, send)

    new = serving(app)
    slow = new().connect()
    slow.send(request("/slow", "Content-Length: 4") + b"abc")
    assert answer_to_new(new).status == 200
    assert started == ["/live"]
    slow.send(b"d")
    assert slow.answer().status == 200


def test_a_trickle_does_not_prolong_the_time_for_a_body(serving):
    connection = serving(body_timeout=4 * SHORT)().connect()
    connection.send(completion_head("Content-Length: 1000000"))
    connection.socket.settimeout(SHORT / 10)
    with contextlib.suppress(ConnectionError):
        for _ in range(1_000_000):
            with contextlib.suppress(TimeoutError):
                assert connection.socket.recv(1) == b"H"
                break
            connection.socket.sendall(b" ")
        else:
            pytest.fail("everything was read")


def test_the_rest_of_an_answered_body_has_the_time_of_an_idle_one(serving):
    connection = serving(body_idle_timeout=4 * SHORT)().connect()
    connection.send(request("/nope", "Content-Length: 1000000", method="POST"))
    assert connection.answer().status == 404
    connection.socket.settimeout(SHORT / 10)
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            with contextlib.suppress(TimeoutError):
                assert not connection.socket.recv(1)
                break
            connection.socket.sendall(b" ")
        else:
            pytest.fail("everything was read")


def test_pipelined_requests_take_turns_with_others(serving):
    served_paths, first, other_sent = [], asyncio.Event(), threading.Event()

    async def app(scope, receive, send):
        served_paths.append(scope["path"])
        if scope["path"] == "/pipelined" and not first.is_set():
            first.set()
            await asyncio.to_thread(other_sent.wait, 60)
        await Response(b"a")(scope, receive, send)

    new = serving(app)
    other, pipelining = new().connect(), new().connect()
    other.send(request("/first"))
    assert other.answer().status == 200
    sender = threading.Thread(target=pipelining.send, args=[request("/pipelined") * 5000])
    sender.start()
    while "/pipelined" not in served_paths:
        pass
    other.send(request("/other"))
    other_sent.set()
    assert other.answer().status == 200
    assert [pipelining.answer().body for _ in range(5000)] == [b"a"] * 5000
    sender.join()
    assert served_paths.index("/other") < 1000


def test_pipelined_requests_are_not_read_while_the_first_one_runs(serving, llm):
    new = serving()
    pipelining, other = new().connect(), new().connect()
    pipelining.send(HOLD)
    assert llm.held_seen.wait(60)
    pipelining.socket.setblocking(False)
    num_sent, num_full = 0, 0
    while num_full < 20:
        try:
            num_sent += pipelining.socket.send(request() * 1000)
            assert num_sent < 50_000_000
        except BlockingIOError:
            num_full += 1
            other.send(request())
            assert other.answer().status == 200


@pytest.mark.parametrize("size", [http_protocol.BYTES_PER_TURN // 2, 10 * http_protocol.BYTES_PER_TURN])
def test_a_turn_parses_no_more_than_its_bytes(serving, llm, monkeypatch, size):
    turns = []

    def counted_turn(take_turn, protocol):
        turns.append(0)
        take_turn(protocol)

    def counted_feed(feed, protocol, piece):
        if turns:
            turns[-1] += len(piece)
        feed(protocol, piece)

    call_through(monkeypatch, http_protocol.HttpProtocol, "_take_turn", counted_turn)
    call_through(monkeypatch, http_protocol.HttpProtocol, "_feed", counted_feed)
    body = COMPLETION + b" " * size
    connection = serving()().connect()
    connection.send(completion_head("Transfer-Encoding: chunked") + chunked(body, 1))
    assert connection.answer().status == 200
    assert len(turns) > 1
    assert max(turns) <= http_protocol.BYTES_PER_TURN + 2 * len(request_head.END)


def test_a_turn_of_the_event_loop_is_shared_by_few_connections(serving, monkeypatch):
    num_connections = 3 * connections.CALLS_PER_TURN
    loop_turn, turns_taken = 0, []
    has_begun, all_sent = threading.Event(), threading.Event()

    def noted_turn(take_turn, protocol):
        turns_taken.append(loop_turn)
        take_turn(protocol)

    async def app(scope, receive, send):
        async def count_loop_turns():
            nonlocal loop_turn
            while len(turns_taken) < num_connections:
                loop_turn += 1
                await asyncio.sleep(0)

        if scope["path"] == "/first":
            turns_taken.clear()
            has_begun.set()
            all_sent.wait(60)  # so that all that is sent meanwhile is read in one turn
            await count_loop_turns()
        await Response(b"a")(scope, receive, send)

    new = serving(app)
    first, *others = [new().connect() for _ in range(1 + num_connections)]
    for connection in others:
        connection.send(request("/warm"))
        assert connection.answer().status == 200
    call_through(monkeypatch, http_protocol.HttpProtocol, "_take_turn", noted_turn)
    first.send(request("/first"))
    assert has_begun.wait(60)
    for connection in others:
        connection.send(request("/other"))
    all_sent.set()
    assert all(connection.answer().status == 200 for connection in (first, *others))
    assert max(Counter(turns_taken).values()) <= connections.CALLS_PER_TURN


class Clock:
    """An event loop with nothing but its clock and timers."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_at(self, when, function):
        timer = Timer(when, function)
        self.timers.append(timer)
        return timer

    def run_until(self, when):
        while due := [timer for timer in self.timers if timer.when <= when]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            if not first.is_cancelled:
                first.function()
        self.now = when


class Timer:
    def __init__(self, when, function):
        self.when = when
        self.function = function
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["clear", "close", 0, 1, 3, 10]))))
def test_a_deadline_passes_when_it_was_set_to_last(steps):
    clock, passed, expected, due = Clock(), [], [], None
    deadline = Deadline(clock, lambda: passed.append(clock.now))
    for wait, action in [*steps, (20, "close")]:
        until = clock.now + wait
        if due is not None and due <= until:
            expected.append(due)
            due = None
        clock.run_until(until)
        if action in ("clear", "close"):
            getattr(deadline, action)()
            due = None
        else:
            deadline.set(action)
            due = until + action
    assert passed == expected
    assert not any(not timer.is_cancelled for timer in clock.timers)


class Dropped(list):
    def connection(self):
        return Droppable(self)


class Droppable:
    def __init__(self, dropped):
        self.drop = lambda: dropped.append(self)


def test_connections_make_room_in_the_order_in_which_they_began_to_wait():
    dropped = Dropped()
    connections = Connections(3)
    a, b, c = (dropped.connection() for _ in range(3))
    for one in (a, b, c):
        assert connections.make_room()
        connections.add(one)
    connections.serves(a)
    connections.waits(b)
    connections.serves(c)
    connections.waits(c)
    assert connections.make_room()
    assert dropped == [b]
    assert len(connections) == 2
    connections.waits(b)  # it is gone
    connections.add(d := dropped.connection())
    connections.serves(c)
    connections.replace(d, e := dropped.connection())
    assert connections.make_room()
    assert dropped == [b, e]
    connections.add(dropped.connection())
    connections.serves(a)
    assert connections.make_room()
    assert not connections.drop_longest_waiting()


def test_the_default_limit_leaves_room_for_other_descriptors(monkeypatch):
    num_open = len(os.listdir("/proc/self/fd"))
    for soft, least, most in [
        (256, 192 - num_open - 4, 192 - num_open + 4),
        (20_000, 16_384, 16_384),
        (resource.RLIM_INFINITY, 16_384, 16_384),
        (8, 1, 1),
    ]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert least <= default_limit() <= most
